"""What a worker passes on to the main process, over a real Unix socket: whole, in pieces, until the client leaves."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from sgviz.errors import StartupError
from sgviz.serving.listeners import open_path, open_port, share_port
from sgviz.serving.pass_on import OWN_PATHS, MainProcess, PassOn
from sgviz.serving.server import ServerHandle


class Behind:
    """The app of the main process: it tells what it was asked, or streams until nobody listens."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.more = asyncio.Event()
        self.left = asyncio.Event()
        self.app = FastAPI(openapi_url=None, redirect_slashes=False)
        self.app.add_api_route("/stream", self.stream)
        self.app.add_api_route("/wait", self.wait)
        self.app.add_api_route("/{path:path}", self.echo, methods=["GET", "POST", "HEAD", "PUT"])

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append(
            {"target": request.scope["raw_path"].decode(), "query": request.url.query, "body": body}
        )
        headers = {"x-key": request.headers.get("authorization", ""), "x-method": request.method}
        return Response(body[::-1], 418, headers, media_type="application/x-thing")

    async def stream(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"data: first\n\n"
                await self.more.wait()
                yield b"data: second\n\n"
                while not await request.is_disconnected():
                    await asyncio.sleep(0.01)
            finally:
                self.left.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def wait(self, request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left.set()
        return Response()


@asynccontextmanager
async def worker(*, with_main: bool = True) -> AsyncIterator[tuple[httpx.AsyncClient, Behind]]:
    """A worker's server whose own app answers "own" to everything, before the one behind it."""
    behind, own = Behind(), FastAPI(openapi_url=None)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "main"))
        main = MainProcess(path)

        async def answer() -> Response:
            return Response("own")

        own.add_api_route("/{path:path}", answer, methods=["GET", "POST"])
        own.add_middleware(PassOn, main=main)
        handles = [await ServerHandle.start(own)]
        if with_main:
            handles.append(await ServerHandle.start(behind.app, listener=open_path(path)))
        async with httpx.AsyncClient(base_url=handles[0].url, timeout=10) as client:
            yield client, behind
        for handle in handles:
            await handle.stop(0.1)
        await main.close()


def test_a_request_is_passed_on_whole_and_its_answer_back() -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            for content in (b"", b"abc", b"x" * 1_000_000):
                answer = await client.post(
                    "/a%20path?q=1&r=%2F", content=content, headers={"authorization": "Bearer key"}
                )
                assert (answer.status_code, answer.content) == (418, content[::-1])
                assert answer.headers["x-key"] == "Bearer key" and answer.headers["x-method"] == "POST"
                assert answer.headers["content-type"] == "application/x-thing"
                assert len(answer.headers.get_list("date")) == 1
                assert behind.asked.pop() == {"target": "/a%20path", "query": "q=1&r=%2F", "body": content}

            async def chunks() -> AsyncIterator[bytes]:
                yield b"in "
                yield b"pieces"

            assert (await client.post("/b", content=chunks())).content == b"seceip ni"
            assert (await client.get("/b")).status_code == 418
            assert (await client.head("/b")).headers["x-method"] == "HEAD"

    asyncio.run(test())


def test_what_is_the_workers_own_stays() -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            for path in sorted(OWN_PATHS):
                assert (await client.post(path)).text == "own"
            assert behind.asked == []

    asyncio.run(test())


def test_a_stream_comes_piece_by_piece_and_ends_with_its_client() -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            async with client.stream("GET", "/stream") as answer:
                lines = answer.aiter_lines()
                assert await anext(lines) == "data: first"  # the second is not made before
                behind.more.set()
                assert [await anext(lines) for _ in range(2)][1] == "data: second"
                assert not behind.left.is_set()
            await asyncio.wait_for(behind.left.wait(), 10)

    asyncio.run(test())


def test_a_client_that_leaves_before_the_answer_is_gone_behind_too() -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/wait", timeout=0.3)
            await asyncio.wait_for(behind.left.wait(), 10)

    asyncio.run(test())


def test_a_main_process_that_is_gone_is_told() -> None:
    async def test() -> None:
        async with worker(with_main=False) as (client, _):
            answer = await client.get("/metrics")
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"

    asyncio.run(test())


def test_a_port_is_shared_by_those_of_one_server_only() -> None:
    shared = share_port("127.0.0.1", 0, 3)
    port = shared[0].getsockname()[1]
    try:
        assert {each.getsockname()[1] for each in shared} == {port}
        for each in shared:
            each.listen(8)
        for attempt in (lambda: open_port("127.0.0.1", port), lambda: share_port("127.0.0.1", port, 2)):
            with pytest.raises(StartupError, match="cannot listen on"):
                attempt()
    finally:
        for each in shared:
            each.close()
    open_port("127.0.0.1", port).close()
