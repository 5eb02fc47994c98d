"""PassOn: what a tokenizer worker does not answer itself goes on to the main process, and the answer comes back.

A worker generates and tokenizes; whatever concerns the engine as a whole (control, sessions, health, metrics, the live
page, any path that is not named here) has one owner. A body is passed on when it has come whole and within its bounds,
an answer piece by piece; a client that leaves is gone for the main process as well, and an answer that breaks off there
breaks off here. SGLang has no counterpart: its workers do these with the router's help.
Imports: config, errors, this folder.
"""

from __future__ import annotations

import asyncio
import logging

import httpx2
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgviz.config import HttpConfig
from sgviz.errors import SgvizError, Unavailable
from sgviz.serving.auth import AccessRules, AuthLevel, AuthMiddleware, check_access
from sgviz.serving.body_limits import MIB, BodyLimits, has_body
from sgviz.serving.context import Keys
from sgviz.serving.counting import Counts, endpoint_of
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
OF_THE_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}
)  # and what `Connection` names, and proxy-*
MADE_ANEW = frozenset({b"content-length", b"expect"})  # of a request whose body is here already
CONNECT_S = 10.0
IDLE_S = 5.0  # an idle connection to the main process is closed by this end, before that end does it
CLIENT = "sgviz.client"  # in the scope: the way to the client without what is added to a worker's own answers
RawHeaders = list[tuple[bytes, bytes]]


class MainProcess:
    """The way to the main process's app: HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=IDLE_S)
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=path, limits=limits),
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
        )

    async def send(self, scope: Scope, body: bytes) -> httpx2.Response:
        """Ask for what `scope` asks for; the answer's body is still to be read.

        Raises:
            httpx2.TransportError: there is no answer.
        """
        query = scope["query_string"]
        request = httpx2.Request(
            scope["method"],
            "http://main/",
            headers=end_to_end(scope["headers"], MADE_ANEW),
            content=body,
            # a URL would be tidied up: `/a/../b` is another path than `/b`
            extensions={"target": scope["raw_path"] + (b"?" + query if query else b"")},
        )
        return await self._client.send(request, stream=True)

    async def close(self) -> None:
        await self._client.aclose()


class PassOn:
    """Outermost in a worker's app: keys, limits and counts are those of whoever answers.

    What the main process would refuse for its body, or for a body without a key, is refused here, before it is read.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        main: MainProcess,
        http: HttpConfig,
        keys: Keys,
        rules: AccessRules,
        counts: Counts,
    ) -> None:
        self._app, self._main, self._counts = app, main, counts
        limits = BodyLimits(
            self._pass_on, max_bytes=int(http.max_body_mb * MIB), read_timeout=http.read_timeout
        )
        self._guarded: ASGIApp = _BodyKeys(limits, keys=keys, rules=rules)
        if http.origins:
            self._guarded = CORSMiddleware(
                self._guarded, allow_origins=http.origins, allow_methods=["*"], allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OWN_PATHS:
            await self._app(scope, receive, send)
            return

        async def own(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint, method = endpoint_of(scope), scope["method"]
                self._counts.came(endpoint, method)
                self._counts.left(endpoint, method, str(message["status"]))
            await send(message)

        await self._guarded({**scope, CLIENT: send}, receive, own)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await receive()  # whole, from the limits
        if body["type"] == "http.disconnect":
            return
        work = asyncio.create_task(self._answer(scope, body.get("body", b""), receive, send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        try:
            response = await self._main.send(scope, body)
        except httpx2.TransportError as error:
            log.warning("the main process does not answer: %r", error)
            refusal = error_response(Unavailable("the main process of the server does not answer"))
            await refusal(scope, receive, send)
        else:
            await _pass_back(response, scope[CLIENT])


class _BodyKeys(AuthMiddleware):
    """Refuses a body that comes without any key that could do; what comes without one, the main process judges.

    Paths that only the main process declares are held for NORMAL here, so the admin's key passes them too.
    """

    def _check(self, scope: Scope) -> SgvizError | None:
        headers = Headers(scope=scope)
        error = super()._check(scope) if has_body(headers) else None
        if error is not None and self._rules.level_of(scope["path"]) is AuthLevel.NORMAL:
            admin = check_access(AuthLevel.ADMIN_OPTIONAL, self._keys, headers.get("authorization", ""))
            return error if admin is not None else None
        return error


async def until_gone(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_back(response: httpx2.Response, send: Send) -> None:
    """Raises Unavailable, and leaves the answer without an end, if it breaks off."""
    raw = response.headers.raw
    headers = end_to_end(raw, frozenset({b"date"}))
    if b"close" in _named(raw):
        headers.append((b"connection", b"close"))
    try:
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for piece in response.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except httpx2.TransportError as error:
        raise Unavailable(f"an answer of the main process broke off: {error!r}") from error
    finally:
        await response.aclose()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def end_to_end(headers: RawHeaders, without: frozenset[bytes]) -> RawHeaders:
    """The headers that are not about the one connection, nor of `without`."""
    left_out = OF_THE_HOP | _named(headers) | without
    lowered = [(name.lower(), value) for name, value in headers]
    return [each for each in lowered if each[0] not in left_out and not each[0].startswith(b"proxy-")]


def _named(headers: RawHeaders) -> set[bytes]:
    """What the `Connection` headers name, in lower case."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")}
