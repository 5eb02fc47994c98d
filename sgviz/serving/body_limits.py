"""Request bodies within bounds: counted while they are read, waited for only so long, and read before anything runs.

SGLang leaves both to a gateway. Every endpoint needs its whole body, so it is read here, and the answer's way out
stays untouched. Imports: errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgviz.errors import ClientDisconnected, SgvizError, from_status
from sgviz.serving.http_errors import error_response

MIB = 1 << 20
LINGER_S = 2.0  # what a refused client still sends is read for so long, or it might not see the answer
SLOWEST_RATE = 1024  # bytes that buy a slow client another second


class BodyLimits:
    """Middleware: 413 for a body above `max_bytes`, 408 for one that stops coming; both close the connection.

    Args:
        read_timeout: seconds a body may take, and one more for every KiB of it that has come.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, read_timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        try:
            self._check_length(headers)
            body = await self._read(receive)
        except ClientDisconnected:
            return  # nobody is there to be told
        except SgvizError as error:
            await self._refuse(error, headers, scope, receive, send)
        else:
            await self._app(scope, _replay(body, receive), send)

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large(f"has {length} bytes")

    async def _read(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        size, more = 0, True
        start = asyncio.get_running_loop().time()
        while more:
            try:
                async with asyncio.timeout_at(start + self._read_timeout + size / SLOWEST_RATE):
                    message = await receive()
            except TimeoutError:
                raise from_status(408, self._too_slow(size)) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client hung up")
            pieces.append(message.get("body", b""))
            size, more = size + len(pieces[-1]), message.get("more_body", False)
            if size > self._max_bytes:
                raise self._too_large(f"has more than {self._max_bytes} bytes")
        return b"".join(pieces)

    def _too_slow(self, size: int) -> str:
        return (
            f"the body did not arrive in time: {size} bytes came within {self._read_timeout:g} s (read_timeout) "
            "and a second for every KiB"
        )

    def _too_large(self, found: str) -> SgvizError:
        return from_status(413, f"the body {found}; at most {self._max_bytes} are allowed (max_body_mb)")

    async def _refuse(
        self, error: SgvizError, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = error_response(error)
        response.headers["connection"] = "close"
        # a client that waits for a go-ahead sends nothing, and asking for more would give it
        waits = headers.get("expect", "").lower() == "100-continue"
        lingers = error.status == 413 and not waits

        async def sending(message: Message) -> None:
            last = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if last and lingers else message)

        await response(scope, receive, sending)
        if lingers:
            await _drain(receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_body(headers: Headers) -> bool:
    """Whether a request with these headers has a body."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """The body that has been read, then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


async def _drain(receive: Receive) -> None:
    """Read and forget until the client has said all, has gone, or has had its time."""
    try:
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
