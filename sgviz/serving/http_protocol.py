"""uvicorn's protocol with a bound on what a client may leave half-said: the head of a request.

uvicorn waits for ever for a head and takes one of any length. Bodies are the middleware's business (`body_limits`).
Imports: errors.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sgviz.errors import from_status
from sgviz.serving.http_errors import error_body

MAX_HEAD_BYTES = 64 * 1024  # request line and headers


class GuardedConfig(uvicorn.Config):
    """uvicorn's configuration, and `read_timeout`: seconds the head of a request may take."""

    def __init__(self, app: Any, *, read_timeout: float, **options: Any) -> None:
        super().__init__(app, http=GuardedProtocol, **options)
        self.read_timeout = read_timeout


class GuardedProtocol(HttpToolsProtocol):
    """Answers 408 when a head has begun and does not end in time, 431 when it is too long.

    A connection on which nothing was said within that time is closed without a word.
    """

    def __init__(self, config: GuardedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._read_timeout = config.read_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._head_begun = False
        self._head_bytes = 0

    # ------------------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes, which is the limit"
                )
                return
        if self._timer is None and (self._head_begun or self._is_quiet):
            self._start_timer()

    # ------------------------------------------------------------ of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun = True

    def on_headers_complete(self) -> None:
        self._head_begun = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"this is no HTTP request: {msg}")

    # ------------------------------------------------------------ inside

    @property
    def _is_quiet(self) -> bool:
        """No answer is owed."""
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._read_timeout, self._on_time_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time_up(self) -> None:
        self._timer = None
        if not self._is_quiet:
            self._start_timer()  # half a request behind one that is still being answered
        elif self._head_begun:
            self._refuse(
                408, f"the head of the request did not end within {self._read_timeout:g} s (read_timeout)"
            )
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """An answer from outside the app, which closes the connection."""
        self._stop_timer()
        body = msgspec.json.encode(error_body(from_status(status, message)))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
