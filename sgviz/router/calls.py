"""A request to one server of a pair: sent, counted, watched, ended.

Imports: errors, serving (hop headers), this folder.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2
import msgspec
from starlette.responses import Response

from sgviz.errors import SgvizError, Unavailable
from sgviz.router.servers import Server
from sgviz.serving.http_errors import error_response
from sgviz.serving.pass_on import MADE_ANEW, RawHeaders, end_to_end

ABORT_S = 2.0  # a server that was told to abort gets so long to end the request by itself
NOT_PASSED = MADE_ANEW | {b"host", b"accept-encoding"}  # answers come as they are, and are looked at


class Trouble(Exception):
    """A server of the pair did not give what was asked for.

    Attributes:
        answer: what the client gets if nobody else can do it. retry: another server may.
        lost: why the server has no connection, "" if it answered. broke: it had one, and nobody knows how far it came.
    """

    def __init__(
        self, server: Server, answer: Response, *, retry: bool, lost: str = "", broke: bool = False
    ) -> None:
        super().__init__(f"{server.side} server {server.url}")
        self.server, self.answer, self.retry, self.lost, self.broke = server, answer, retry, lost, broke


@dataclass(frozen=True, slots=True)
class Told:
    """A whole answer."""

    status: int
    headers: RawHeaders
    body: bytes

    def response(self) -> Response:
        """The same for the client."""
        response = Response(self.body, self.status)
        response.raw_headers = self.headers
        return response


class Call:
    """One side of a pair at work. `close` it in the end; what it still does then breaks off there."""

    def __init__(
        self, client: httpx2.AsyncClient, server: Server, target: bytes, headers: RawHeaders, body: bytes
    ) -> None:
        self.server, self._client, self._headers = server, client, headers
        self._request = request_to(client, server, "POST", target, headers, body)
        server.requests += 1
        server.given += 1
        self._open = True
        self._response: httpx2.Response | None = None
        self.head = asyncio.create_task(self._send())

    async def _send(self) -> httpx2.Response:
        """Raises Trouble if there is no answer."""
        try:
            return await self.server.while_it_lives(self._begin())
        except httpx2.TransportError as error:
            raise self._broken(
                error, sent=not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            ) from None

    async def _begin(self) -> httpx2.Response:
        self._response = await self._client.send(self._request, stream=True)
        return self._response

    async def whole(self) -> Told:
        """The answer to its end.

        Raises:
            Trouble: it is an error, or broke off.
        """
        response = await self.head
        try:
            body = await self.server.while_it_lives(_raw(response))
        except httpx2.TransportError as error:
            raise self._broken(error, sent=True) from None
        told = Told(response.status_code, end_to_end(response.headers.raw, frozenset({b"date"})), body)
        if told.status >= 400:
            raise Trouble(self.server, told.response(), retry=told.status == Unavailable.status)
        return told

    def broken(self, error: httpx2.RequestError) -> SgvizError:
        """What a client is told of an answer that breaks off."""
        server = self.server
        return Unavailable(
            f"the {server.side} server {server.url} broke off in the middle of the answer ({type(error).__name__})"
        )

    def _broken(self, error: httpx2.TransportError, *, sent: bool) -> Trouble:
        what = "broke off before it answered" if sent else "cannot be reached"
        why, server = f"{what} ({type(error).__name__})", self.server
        answer = error_response(Unavailable(f"the {server.side} server {server.url} {why}"))
        return Trouble(server, answer, retry=True, lost=f"it {why}", broke=sent)

    async def quit(self, rids: Sequence[str]) -> None:
        """Have the server end it, so that the rids are free there, then close."""
        try:
            if self._open and not self.head.done() and await self._abort(rids):
                await asyncio.wait((self.head,), timeout=ABORT_S)
        finally:
            await self.close()

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self.server.requests -= 1
        self.head.cancel()
        with contextlib.suppress(asyncio.CancelledError, Trouble):
            await self.head
        if self._response is not None:  # also where the head was cancelled as it came
            await self._response.aclose()

    async def _abort(self, rids: Sequence[str]) -> bool:
        """Whether the server took it."""
        url = f"{self.server.url}/abort_request"
        headers = [each for each in self._headers if each[0] == b"authorization"]
        headers.append((b"content-type", b"application/json"))
        try:
            async with asyncio.timeout(ABORT_S):
                for rid in rids:
                    content = msgspec.json.encode({"rid": rid})
                    response = await self._client.post(url, headers=headers, content=content)
                    if response.status_code != 200:
                        return False
        except (TimeoutError, httpx2.TransportError):
            return False
        return True


def request_to(
    client: httpx2.AsyncClient, server: Server, method: str, target: bytes, headers: RawHeaders, body: bytes
) -> httpx2.Request:
    """`target`: path and query as they came; a URL would be tidied up."""
    extensions = {"target": target}
    return client.build_request(method, server.url, headers=headers, content=body, extensions=extensions)


async def _raw(response: httpx2.Response) -> bytes:
    return b"".join([piece async for piece in response.aiter_raw()])
