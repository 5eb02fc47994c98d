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

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; trailers of a body count as a head of their own
TOO_LONG = f"the head of the request has more than {MAX_HEAD_BYTES} bytes, which is the limit"


LINGER_S = 1.0  # what still comes is thrown away: a close before it is read could take the answer with it


class HeadTooLong(Exception):
    """Raised through the parser, which reads no further then."""


class GuardedConfig(uvicorn.Config):
    """uvicorn's configuration, and `read_timeout`: seconds the head of a request may take."""

    def __init__(self, app: Any, *, read_timeout: float, **options: Any) -> None:
        super().__init__(app, http=GuardedProtocol, **options)
        self.read_timeout = read_timeout


class GuardedProtocol(HttpToolsProtocol):
    """Answers 408 when a head has begun and does not end in time, 431 when it is too long.

    A connection on which nothing was said within that time is closed without a word. What is refused behind requests
    that are still being answered gets its answer after theirs.
    """

    def __init__(self, config: GuardedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._read_timeout = config.read_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._head_begun = False
        self._in_message = False
        self._messages = 0  # begun
        self._parsed_bytes = 0  # of the head (or trailers), as the parser told its parts
        self._raw_bytes = 0  # of a head without end, as they were read
        self._held: bytes | None = None  # a refusal that waits for the answers before it
        self._is_over = False  # it was said

    # ------------------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._held is not None:
            return  # nothing behind a refusal is looked at
        before, between = self._messages, not self._in_message
        super().data_received(data)
        if self.transport.is_closing() or self._is_over or self._held is not None:
            return
        if self._head_begun:
            # of a read in which others end and this one begins only the parser knows what is whose
            alone = self._messages == before or (between and self._messages == before + 1)
            self._raw_bytes += len(data) if alone else 0
            if self._raw_bytes > MAX_HEAD_BYTES:
                self._refuse(431, TOO_LONG)
                return
        if self._timer is None and (self._head_begun or self._is_quiet):
            self._start_timer()

    # ------------------------------------------------------------ of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun = self._in_message = True
        self._messages += 1
        self._parsed_bytes = self._raw_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._count(len(self.parser.get_method()) + len("  HTTP/1.1\r\n\r\n"))
        self._head_begun = False
        self._parsed_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held is not None and self._is_quiet:
            self._say_and_close(self._held)

    def send_400_response(self, msg: str) -> None:
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._refuse(431, TOO_LONG)
        else:
            self._refuse(400, f"this is no HTTP request: {msg}")

    # ------------------------------------------------------------ inside

    @property
    def _is_quiet(self) -> bool:
        """No answer is owed."""
        return self.cycle is None or self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            raise HeadTooLong

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
        in_body = self._in_message and not self._head_begun
        if self._is_quiet or (in_body and not self.pipeline):  # its own request waits for that body
            self._say_and_close(head.encode() + body)
        else:
            self._held = head.encode() + body

    def _say_and_close(self, answer: bytes) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._is_over, self._held = True, None
        self.transport.write(answer)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        if not self._is_quiet:  # a request whose body never comes: it has nothing to say any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
