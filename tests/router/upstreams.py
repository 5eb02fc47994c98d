"""Servers that stand behind a router in its tests: they answer as told, and tell what they were asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response, StreamingResponse

from sgviz.router.options import RouterOptions
from sgviz.router.run import RunningRouter, running
from sgviz.serving.routing import tell_ranks_out
from sgviz.serving.server import ServerHandle

CHUNKS = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b'data: {"b":1}\n\ndata: ', b"[DONE]\n\n"]


@dataclass
class Upstream:
    """One server.

    `status`: of its answers; `refusal`: body of those that are none; `hold`: it says nothing until that is set;
    `chunks`: its streams; `die_after`: pieces after which their connection breaks; `stuck`: they stop for ever before
    the last piece; `quiet`: it does not answer looks; `refusals`: how often `status` counts, behind that it is 200.
    """

    side: str
    status: int = 200
    refusals: int = 1_000
    mode: str | None = None
    hold: asyncio.Event | None = None
    die_after: int | None = None
    chunks: list[bytes] = field(default_factory=lambda: list(CHUNKS))
    refusal: bytes | None = None
    quiet: bool = False
    lost_ranks: tuple[int, ...] = ()  # of 4, by the room; requests with a room of theirs get 503
    stuck: bool = False
    generates: bool = True  # what /health_generate says
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[Headers] = field(default_factory=list)  # of `asked`, and of what else it was sent
    paths: list[str] = field(default_factory=list)  # what else it was sent, with methods
    aborted: list[str] = field(default_factory=list)
    left: int = 0  # requests whose client left
    handle: ServerHandle | None = None

    @property
    def url(self) -> str:
        assert self.handle is not None
        return self.handle.url

    async def start(self, port: int = 0) -> None:
        self.handle = await ServerHandle.start(self._app(), port=port)

    async def stop(self) -> None:
        if self.handle is not None:
            await self.handle.stop(0.0)

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/ping")
        async def ping() -> Response:
            if self.quiet:
                await asyncio.sleep(60.0)
            return Response(headers=tell_ranks_out(self.lost_ranks, 4))

        @app.get("/health_generate")
        async def generates() -> Response:
            return Response(status_code=200 if self.generates else 503)

        @app.get("/server_info")
        async def info() -> Response:
            mode = self.mode or self.side
            return JSONResponse({"disaggregation_mode": mode, "disaggregation_bootstrap_port": 4321})

        @app.get("/v1/models")
        async def models() -> Response:
            return JSONResponse({"data": [{"id": self.side}]})

        @app.post("/abort_request")
        async def abort(request: Request) -> Response:
            self.aborted.append((await request.json())["rid"])
            if self.hold is not None:
                self.hold.set()
            return Response()

        async def generate(request: Request) -> Response:
            return await self._generate(request)

        async def other(request: Request) -> Response:
            self.paths.append(f"{request.method} {request.url.path}")
            self.heads.append(request.headers)
            if self.hold is not None:
                await self.hold.wait()
            return JSONResponse({"from": self.url}, headers={"set-cookie": "secret=1", "x-side": self.side})

        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.add_route(path, generate, methods=["POST"])
        app.add_route("/{path:path}", other, methods=["GET", "HEAD", "POST", "PUT"])
        return app

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.heads.append(request.headers)
        if self.hold is not None:
            await self._wait(self.hold)
        self.refusals -= self.status != 200
        self.status = 200 if self.refusals < 0 else self.status
        if self.status != 200 or self._is_for_a_lost_rank(body):
            if self.refusal is not None:
                return Response(self.refusal, self.status, {"x-why": "so"}, "application/problem+json")
            return JSONResponse(
                {"error": {"message": f"{self.side} refuses", "code": self.status}},
                503 if self.status == 200 else self.status,
            )
        if body.get("stream"):
            return StreamingResponse(
                self._stream(), media_type="text/event-stream", headers={"x-side": self.side}
            )
        return JSONResponse({"from": self.side, "rid": body["rid"]}, headers={"x-side": self.side})

    def _is_for_a_lost_rank(self, body: dict[str, Any]) -> bool:
        rooms = body["bootstrap_room"]
        return any(room % 4 in self.lost_ranks for room in (rooms if isinstance(rooms, list) else [rooms]))

    async def _wait(self, hold: asyncio.Event) -> None:
        try:
            await hold.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _stream(self) -> AsyncIterator[bytes]:
        for number, chunk in enumerate(self.chunks):
            if number == self.die_after:
                raise ConnectionAbortedError("it dies here")
            if self.stuck and number == len(self.chunks) - 1:
                await self._wait(asyncio.Event())
            yield chunk
            await asyncio.sleep(0)  # so that each piece goes out alone


@dataclass
class Rig:
    """A router and its servers."""

    router: RunningRouter
    client: httpx2.AsyncClient
    prefill: list[Upstream]
    decode: list[Upstream]

    async def post(self, path: str = "/generate", **body: Any) -> httpx2.Response:
        return await self.client.post(
            self.router.url + path, json={"text": "hi", **body} if path == "/generate" else body
        )


@asynccontextmanager
async def rig(
    prefill: list[Upstream] | None = None, decode: list[Upstream] | None = None, **options: Any
) -> AsyncGenerator[Rig, None]:
    """A router over servers that run, one of either side by default."""
    prefill, decode = prefill or [Upstream("prefill")], decode or [Upstream("decode")]
    async with AsyncExitStack() as stack:
        for upstream in (*prefill, *decode):
            await upstream.start()
            stack.push_async_callback(upstream.stop)
        known: dict[str, Any] = {
            "prefill": tuple((each.url, None) for each in prefill),
            "decode": tuple(each.url for each in decode),
            "port": 0, "health_interval": 0.1, "seed": 1,
        }  # fmt: skip
        router = await stack.enter_async_context(running(RouterOptions(**{**known, **options}), 0.1))
        client = await stack.enter_async_context(httpx2.AsyncClient(timeout=30.0))
        yield Rig(router, client, prefill, decode)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(response.content)["error"]
    return error
