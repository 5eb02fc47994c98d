"""BootstrapServer: where decode servers learn how a prefill server's ranks are reached. HTTP, in a thread.

PUT /route registers a rank, GET /route answers with one or, for ranks of -1, with what all share; 503 until all are
in. POST /register_dp_rank and /query_dp_ranks tell which rank has a room where the room's number does not.
Mirrors SGLang's CommonKVBootstrapServer. Simplified: one tensor and one pipeline rank. Imports: disaggregation, errors.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response

from sgviz.disaggregation.heart import bracketed
from sgviz.disaggregation.wire import RankRoute, ServerRoute
from sgviz.errors import BadRequest, NotFound, SgvizError, StartupError, Unavailable
from sgviz.events.clock import Clock, WallClock

PURGE_NS = 120 * 10**9
T = TypeVar("T")


class RegisterRank(msgspec.Struct, frozen=True):
    bootstrap_room: int
    dp_rank: int


class QueryRanks(msgspec.Struct, frozen=True):
    bootstrap_rooms: list[int]


class Routes:
    """What the server knows. Safe for one thread at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranks: dict[int, RankRoute] = {}
        self._rooms: dict[int, tuple[int, int]] = {}  # room -> rank, since when
        self._purge_at = clock.now() + PURGE_NS

    def put(self, route: RankRoute) -> None:
        """A rank is there, or there again. Raises BadRequest if it does not fit to the others."""
        if not 0 <= route.dp_rank < route.dp_size:
            raise BadRequest(f"dp_rank {route.dp_rank} is not below dp_size {route.dp_size}", param="dp_rank")
        others = [each for rank, each in self._ranks.items() if rank != route.dp_rank]
        for other in others:
            if (other.dp_size, other.tag) != (route.dp_size, route.tag):
                raise BadRequest(
                    f"rank {route.dp_rank} ({route.dp_size} ranks of {route.tag}) is not of the same server as rank "
                    f"{other.dp_rank} ({other.dp_size} ranks of {other.tag})"
                )
        self._ranks[route.dp_rank] = route

    def server(self) -> ServerRoute:
        first = self._complete()
        return ServerRoute(
            dp_size=first.dp_size,
            page_size=first.page_size,
            kv_cache_dtype=first.tag,
            follow_bootstrap_room=first.follow_bootstrap_room,
        )

    def rank(self, number: int) -> RankRoute:
        self._complete()
        if number not in self._ranks:
            raise NotFound(f"there is no prefill rank {number}; there are {len(self._ranks)}, from 0 on")
        return self._ranks[number]

    def register(self, room: int, dp_rank: int) -> None:
        self._purge()
        self._rooms[room] = (dp_rank, self._clock.now())

    def query(self, rooms: list[int]) -> dict[str, int]:
        self._purge()
        return {str(room): self._rooms[room][0] for room in rooms if room in self._rooms}

    def _complete(self) -> RankRoute:
        first = next(iter(self._ranks.values()), None)
        if first is None or len(self._ranks) < first.dp_size:
            wanted = "unknown" if first is None else str(first.dp_size)
            raise Unavailable(f"{len(self._ranks)} prefill ranks have registered, of {wanted}")
        return first

    def _purge(self) -> None:
        now = self._clock.now()
        if now < self._purge_at:
            return
        self._purge_at = now + PURGE_NS
        self._rooms = {room: entry for room, entry in self._rooms.items() if now - entry[1] < PURGE_NS}


class BootstrapServer:
    """Serves from construction to `close`.

    Args:
        host, port: to listen at; port 0 takes a free one, see `.port`.

    Raises:
        StartupError: the address cannot be used.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None) -> None:
        self.host = host
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        app = make_app(Routes(clock or WallClock()))
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="sgviz-bootstrap", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def make_app(routes: Routes) -> FastAPI:
    """The endpoints over `routes`."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(SgvizError)
    async def failed(request: Request, error: SgvizError) -> Response:
        return Response(error.message, error.status, media_type="text/plain")

    @app.get("/health")
    async def health() -> Response:
        return Response("OK", media_type="text/plain")

    @app.put("/route")
    async def put_route(request: Request) -> Response:
        routes.put(await _body(request, RankRoute))
        return Response("OK", media_type="text/plain")

    @app.get("/route")
    async def get_route(request: Request) -> Response:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        ranks = [_rank(request, name) for name in names]
        if ranks == [-1] * len(names):
            return _json(routes.server())
        if any(ranks[1:]):
            raise NotFound(f"a prefill rank here has cp, tp and pp rank 0, not {ranks[1:]}")
        return _json(routes.rank(ranks[0]))

    @app.post("/register_dp_rank")
    async def register(request: Request) -> Response:
        body = await _body(request, RegisterRank)
        routes.register(body.bootstrap_room, body.dp_rank)
        return Response("OK", media_type="text/plain")

    @app.post("/query_dp_ranks")
    async def query(request: Request) -> Response:
        return _json(routes.query((await _body(request, QueryRanks)).bootstrap_rooms))

    return app


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"the bootstrap server cannot listen at {bracketed(host)}:{port}: {error.strerror}; choose another "
            "disaggregation_bootstrap_port (0: a free one) or disaggregation_bootstrap_host"
        ) from error
    return listener


async def _body(request: Request, type: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=type)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body cannot be read: {error}") from error


def _rank(request: Request, name: str) -> int:
    text = request.query_params.get(name)
    try:
        return int(text or "")
    except ValueError:
        raise BadRequest(f"{name} = {text!r} is not allowed; it must be a number", param=name) from None


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
