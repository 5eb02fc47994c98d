"""Router: the servers, who gets a request, and what passes between; one asyncio loop owns it.

Imports: errors, events, serving, this folder.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Coroutine
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx2
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from sgviz.errors import SgvizError, Unavailable
from sgviz.events import Tracer
from sgviz.router.asking import agreed, ask, ask_each, info_of, shown, target_of, worst
from sgviz.router.bodies import Asked
from sgviz.router.calls import NOT_PASSED, Told
from sgviz.router.choose import Chooser
from sgviz.router.exchange import Exchange
from sgviz.router.metrics import Counts, exposition
from sgviz.router.options import RouterOptions
from sgviz.router.pair_stream import PairStream, Spawn
from sgviz.router.rooms import Names, Rooms
from sgviz.router.servers import Watch
from sgviz.serving.http_errors import error_response, json_response, validate_json_request
from sgviz.serving.pass_on import CONNECT_S, IDLE_S, end_to_end
from sgviz.serving.reply import ClientWatch

PROBE_S = 25.0  # a server says itself after 20 s that nothing came through
DEAD_S = 30  # a host that vanishes, or to which the way is cut, is found dead after so long
T = TypeVar("T")
IDLE_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": DEAD_S * 1000}


class Router:
    """Make it in the loop it lives in; `start`, and `close` in the end.

    Attributes:
        prefill, decode: who chooses a server of that side. rooms, names: of the requests under way.
        counts: for /metrics.
    """

    def __init__(self, options: RouterOptions, trace: Tracer) -> None:
        self.options, self.trace = options, trace
        self.client = _client()
        self.watch = Watch(options, self.client)
        rng = random.Random(options.seed)
        self.rooms, self.names, self.counts = Rooms(rng), Names(), Counts()
        self.prefill = Chooser(options.policy, self.watch.prefill, rng)
        self.decode = Chooser(options.policy, self.watch.decode, rng)
        self.spawn = Spawn()

    async def start(self) -> None:
        """Return when each server was looked at; those that are not there yet may come later."""
        await self.watch.start()

    async def close(self) -> None:
        await self.watch.stop()
        await self.spawn.close()
        await self.client.aclose()

    @property
    def has_pair(self) -> bool:
        """A prefill and a decode server are healthy."""
        return all(any(server.healthy for server in side) for side in (self.watch.prefill, self.watch.decode))

    def account(self) -> dict[str, Any]:
        """The router as it is now, for people and programs."""
        return {
            "healthy": self.has_pair,
            "policy": self.options.policy,
            "prefill": [server.account() for server in self.watch.prefill],
            "decode": [server.account() for server in self.watch.decode],
        }

    def health(self) -> Response:
        """200 while a request would find a pair."""
        if self.has_pair:
            return Response()
        lost = [f"{each.side} {each.url}: {each.why}" for each in self.watch.servers if not each.healthy]
        return error_response(Unavailable("there is no pair of healthy servers; " + "; ".join(lost)))

    def metrics(self) -> Response:
        """The router's own; see `metrics`."""
        return Response(
            exposition(self.watch.servers, self.counts), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def probe(self, request: Request) -> Response:
        """200 if a generation comes through at a server of either side."""
        answers = await self._raced(
            request, ask_each(self.client, self.watch.servers, request, timeout=PROBE_S)
        )
        good = {server.side for server, answer in answers.items() if answer.status == 200}
        if len(good) == 2:
            return Response()
        bad = [
            f"{each.side} {each.url}: {shown(answer)}"
            for each, answer in answers.items()
            if answer.status != 200
        ]
        return error_response(
            Unavailable("a generation came through at no pair of servers; " + "; ".join(bad))
        )

    async def server_info(self, request: Request) -> Response:
        """The router's account, in that of each server what it says of itself, and what all say alike as of one."""
        answers = await self._raced(
            request, ask_each(self.client, self.watch.servers, request, self.options.health_timeout)
        )
        sides: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
        for server, answer in answers.items():
            sides[server.side].append({**info_of(answer), **server.account()})
        alike = agreed([info for answer in answers.values() if (info := info_of(answer))])
        return json_response({**alike, **self.account(), **sides})

    async def generate(self, request: Request) -> Response:
        """Answer by a pair."""
        path, response = request.url.path, None
        try:
            response = await self._generate(path, request)
        except SgvizError as error:
            self.counts.answers[path, error.status] += 1
            raise
        except asyncio.CancelledError:
            response = error_response(Unavailable("the router is shutting down"))
        self.counts.answers[path, response.status_code] += 1
        return response

    async def _generate(self, path: str, request: Request) -> Response:
        asked = Asked(path, await validate_json_request(request))
        headers = end_to_end(request.headers.raw, NOT_PASSED)
        watch = ClientWatch(request.receive)
        response: Response | None = None
        try:
            response = await Exchange(self, target_of(request), headers, asked).answer(watch)
        finally:
            if not isinstance(response, PairStream):  # which goes on watching
                watch.close()
        return response

    async def ask_one(self, request: Request) -> Response:
        """What any decode server can answer: the first that does."""
        return (await self._raced(request, self._ask_one(request))).response()

    async def _ask_one(self, request: Request) -> Told:
        tried: list[str] = []
        while True:
            server = self.decode.any_one(tried)
            try:
                return await ask(self.client, server, request)
            except Unavailable as error:
                look = self.watch.suspect(server, "a question got no answer")
                if server.url in tried:
                    raise error from None
                tried.append(server.url)
                if not any(each.healthy for each in self.watch.decode):
                    await asyncio.wait((look,))

    async def ask_all(self, request: Request) -> Response:
        """What concerns every server. `success`: of all; the status is the worst of those that could be asked."""
        answers = await self._raced(request, ask_each(self.client, self.watch.servers, request))
        good = all(answer.status < 400 for answer in answers.values())
        told = {server.url: shown(answer) for server, answer in answers.items()}
        return json_response({"success": good, "servers": told}, worst(answers))

    async def _raced(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Raises ClientDisconnected; `work` has ended then."""
        await request.body()  # which `work` reads again, when the watch has what comes behind it
        watch = ClientWatch(request.receive)
        try:
            return await watch.race(work)
        finally:
            watch.close()


def _client() -> httpx2.AsyncClient:
    """Passes on what it is given, adds nothing of its own, and keeps nothing of one client for another."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
    transport = httpx2.AsyncHTTPTransport(
        verify=ssl.create_default_context(), trust_env=False, limits=limits, socket_options=_found_dead()
    )
    return httpx2.AsyncClient(
        transport=transport,
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        trust_env=False,
        headers={"accept-encoding": "identity"},  # answers are passed on as they come, and looked at
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )


def _found_dead() -> list[tuple[int, int, int]]:
    """What makes a connection to a host that vanished fail, as far as the system can do it."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in IDLE_PROBES.items():
        if (number := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, number, value))
    return options
