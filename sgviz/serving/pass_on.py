"""PassOn: what a tokenizer worker does not answer itself goes on to the main process, and the answer comes back.

A worker generates and tokenizes; whatever concerns the engine as a whole (control, sessions, health, metrics, the live
page, any path that is not named here) has one owner. Streams are passed piece by piece; a client that leaves is gone
for the main process as well. SGLang has no counterpart: its workers do these with the router's help.
Imports: errors, this folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx2
from starlette.types import ASGIApp, Receive, Scope, Send

from sgviz.errors import Unavailable
from sgviz.serving.http_errors import error_response

log = logging.getLogger(__name__)

OWN_PATHS = frozenset(
    {
        "/generate", "/v1/chat/completions", "/v1/completions",
        "/v1/embeddings", "/encode", "/v1/score", "/v1/rerank",
        "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
        "/parse_function_call", "/separate_reasoning",
    }
)  # fmt: skip
OF_THE_HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"date")
CONNECT_S = 10.0
Headers = list[tuple[bytes, bytes]]


class MainProcess:
    """The way to the main process's app: HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=path, limits=httpx2.Limits(max_connections=None)),
            base_url="http://main",
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
        )

    def request(self, scope: Scope, body: AsyncIterator[bytes] | None) -> httpx2.Request:
        """The request of `scope` once more."""
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        url = self._client.base_url.copy_with(raw_path=target)
        return httpx2.Request(scope["method"], url, headers=_without_hop(scope["headers"]), content=body)

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        return await self._client.send(request, stream=True)

    async def close(self) -> None:
        await self._client.aclose()


class PassOn:
    """Outermost in a worker's app: keys, limits and counts are those of whoever answers."""

    def __init__(self, app: ASGIApp, main: MainProcess) -> None:
        self._app, self._main = app, main

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OWN_PATHS:
            await self._app(scope, receive, send)
            return
        asked = _Asked(scope, receive)
        work = asyncio.create_task(self._answer(scope, asked, receive, send))
        gone = asyncio.create_task(asked.until_gone())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, asked: _Asked, receive: Receive, send: Send) -> None:
        try:
            response = await self._main.send(self._main.request(scope, asked.body()))
        except httpx2.TransportError as error:
            log.warning("the main process does not answer: %r", error)
            refusal = error_response(Unavailable("the main process of the server does not answer"))
            await refusal(scope, receive, send)
            return
        try:
            await _pass_back(response, send)
        finally:
            await response.aclose()


class _Asked:
    """What the client sends: the body, and that it has left."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self._has_body = bool(names & {b"content-length", b"transfer-encoding"})
        self._receive = receive
        self._gone = False
        self._read = asyncio.Event()
        if not self._has_body:
            self._read.set()

    def body(self) -> AsyncIterator[bytes] | None:
        return self._pieces() if self._has_body else None

    async def _pieces(self) -> AsyncIterator[bytes]:
        more = True
        try:
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._gone = True
                    return
                more = message.get("more_body", False)
                yield message.get("body", b"")
        finally:
            self._read.set()

    async def until_gone(self) -> None:
        """Wait until the client leaves. Its body is read before, by whoever wants it."""
        await self._read.wait()
        while not self._gone:
            self._gone = (await self._receive())["type"] == "http.disconnect"


async def _pass_back(response: httpx2.Response, send: Send) -> None:
    headers = _without_hop(response.headers.raw)
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    with suppress(httpx2.TransportError):  # broken off there, so it is here
        async for piece in response.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _without_hop(headers: Headers) -> Headers:
    """The headers that are not about the connection."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in OF_THE_HOP]
