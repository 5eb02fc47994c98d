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

from sgviz.config import HttpConfig
from sgviz.errors import StartupError
from sgviz.serving.auth import AccessRules, AuthLevel, AuthMiddleware
from sgviz.serving.context import Keys
from sgviz.serving.listeners import open_path, open_port, share_port
from sgviz.serving.pass_on import OWN_PATHS, MainProcess, PassOn
from sgviz.serving.server import ServerHandle


class Behind:
    """The app of the main process: it tells what it was asked, or streams until nobody listens."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.more = asyncio.Event()
        self.left = asyncio.Event()
        self.headers: list[tuple[bytes, bytes]] = []  # of the last request
        self.app = FastAPI(openapi_url=None, redirect_slashes=False)
        self.app.add_api_route("/stream", self.stream)
        self.app.add_api_route("/wait", self.wait)
        self.app.add_api_route("/broken", self.broken)
        self.app.add_api_route("/closing", self.closing, methods=["POST"])
        self.app.add_api_route("/{path:path}", self.echo, methods=["GET", "POST", "HEAD", "PUT"])

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        self.headers = list(request.scope["headers"])
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

    async def broken(self) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"a part"
            await self.more.wait()
            raise RuntimeError("broken on purpose")

        return StreamingResponse(pieces())

    async def closing(self) -> Response:
        return Response("no", 413, {"connection": "X-Mine, close", "x-mine": "1", "proxy-authenticate": "x"})

    async def wait(self, request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left.set()
        return Response()


class Counted:
    """Counts of the worker's own."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def came(self, endpoint: str, method: str) -> None:
        self.told.append((endpoint, method))

    def left(self, endpoint: str, method: str, status: str) -> None:
        self.told.append((endpoint, method, status))


@asynccontextmanager
async def worker(
    *,
    with_main: bool = True,
    http: HttpConfig | None = None,
    keys: Keys | None = None,
    counts: Counted | None = None,
) -> AsyncIterator[tuple[httpx.AsyncClient, Behind]]:
    """A worker's server whose own app answers "own" to everything, before the one behind it."""
    behind, own = Behind(), FastAPI(openapi_url=None)
    http, keys, rules = http or HttpConfig(), keys or Keys(), AccessRules()
    behind_rules = AccessRules()  # the main process declares paths that a worker does not know
    behind_rules.declare("/admins", AuthLevel.ADMIN_OPTIONAL)
    behind.app.add_middleware(AuthMiddleware, keys=keys, rules=behind_rules)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "main"))
        main = MainProcess(path)

        async def answer() -> Response:
            return Response("own")

        own.add_api_route("/{path:path}", answer, methods=["GET", "POST"])
        own.add_middleware(PassOn, main=main, http=http, keys=keys, rules=rules, counts=counts or Counted())
        handles = [await ServerHandle.start(own, http=http)]
        if with_main:
            handles.append(await ServerHandle.start(behind.app, listener=open_path(path)))
        async with httpx.AsyncClient(base_url=handles[0].url, timeout=10) as client:
            yield client, behind
        for handle in handles:
            await handle.stop(0.1)
        await main.close()


async def say(client: httpx.AsyncClient, *pieces: bytes, bound: float = 20.0) -> bytes:
    """Send these bytes over a connection of its own; all that comes back until the server closes it."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    answer = b""
    try:
        async with asyncio.timeout(bound):
            for piece in pieces:
                writer.write(piece)
            await writer.drain()
            while more := await reader.read(65536):
                answer += more
    except ConnectionError:
        pass  # closed with something unread
    finally:
        writer.close()
    return answer


def head(target: bytes, *headers: bytes, method: bytes = b"POST") -> bytes:
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", b"Host: x", *headers, b"", b""])


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


SMALL = HttpConfig(max_body_mb=1000 / 2**20, read_timeout=0.5)


@pytest.mark.parametrize(
    "pieces, status",
    [
        pytest.param([head(b"/x", b"Content-Length: 9"), b"abc"], 408, id="a body that stops coming"),
        pytest.param(
            [head(b"/x", b"Transfer-Encoding: chunked"), b"3\r\nabc\r\n"], 408, id="chunks that stop"
        ),
        pytest.param([head(b"/x", b"Content-Length: 3000000"), b"x" * 1500], 413, id="too much, half sent"),
        pytest.param(
            [head(b"/x", b"Transfer-Encoding: chunked"), b"800\r\n" + b"x" * 2048 + b"\r\n"],
            413,
            id="chunks without an end",
        ),
        pytest.param(
            [head(b"/x", b"Expect: 100-continue", b"Content-Length: 99999999")], 413, id="asked for before"
        ),
    ],
)
def test_a_body_out_of_bounds_is_refused_before_it_ends(pieces: list[bytes], status: int) -> None:
    async def test() -> None:
        counts = Counted()
        async with worker(http=SMALL, counts=counts) as (client, behind):
            answer = await say(client, *pieces)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" in answer
            assert behind.asked == []
            own = ("/{path:path}", "POST")
            assert counts.told == [own, (*own, str(status))]

    asyncio.run(test())


def test_a_body_without_a_key_is_refused_before_it_comes() -> None:
    async def test() -> None:
        counts, keys = Counted(), Keys(api_key="k", admin_api_key="boss")
        async with worker(keys=keys, counts=counts) as (client, behind):
            for more in ((), (b"Expect: 100-continue",)):
                said = await say(
                    client, head(b"/x", b"Content-Length: 9", b"Connection: close", *more), b"ab"
                )
                assert said.startswith(b"HTTP/1.1 401 ")
            assert behind.asked == [] and len(counts.told) == 4
            for path, key, status in (
                ("/x", "k", 418),
                ("/x", "boss", 401),
                ("/admins", "boss", 418),
                ("/admins", "k", 401),
                ("/metrics", "none", 418),
            ):
                answer = await client.post(path, content=b"abc", headers={"authorization": f"Bearer {key}"})
                assert (path, key, answer.status_code) == (path, key, status)
            assert (await client.get("/x")).status_code == 401
            assert len(counts.told) == 4  # the main process counts what it refuses

    asyncio.run(test())


def test_a_refusal_of_a_worker_can_be_read_by_web_pages_too() -> None:
    async def test() -> None:
        origin = "https://page.example"
        http = HttpConfig(max_body_mb=1000 / 2**20, cors_origins=origin)
        async with worker(http=http) as (client, _):
            answer = await client.post("/x", content=b"x" * 2000, headers={"origin": origin})
            assert answer.status_code == 413
            assert answer.headers["access-control-allow-origin"] == origin

    asyncio.run(test())


@pytest.mark.parametrize(
    "cut",
    [
        head(b"/pause_generation", b"Transfer-Encoding: chunked"),
        head(b"/pause_generation", b"Transfer-Encoding: chunked") + b'3\r\n{"a\r\n',
        head(b"/pause_generation", b"Content-Length: 9") + b"abc",
    ],
)
def test_a_request_whose_client_leaves_in_its_body_is_not_passed_on(cut: bytes) -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(cut)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            for _ in range(5):  # whatever was passed on would be there before these
                await client.get("/after")
            assert [each["target"] for each in behind.asked] == ["/after"] * 5

    asyncio.run(test())


def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            with pytest.raises(httpx.RemoteProtocolError):
                async with client.stream("GET", "/broken") as answer:
                    pieces = answer.aiter_raw()
                    assert await anext(pieces) == b"a part"
                    behind.more.set()
                    async for _ in pieces:
                        pass

    asyncio.run(test())


@pytest.mark.parametrize(
    "target",
    [b"/a/../generate", b"/./b//c", b"//evil/x", b"/a%2Fb", b"/a|b{}", b'/x"y', b"/a;b=[1]", b"/a%zz"],
)
def test_a_path_is_passed_on_as_it_was_written(target: bytes) -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            await say(client, head(target, b"Connection: close", method=b"GET"))
            assert [each["target"] for each in behind.asked] == [target.decode()]

    asyncio.run(test())


def test_what_is_about_one_connection_stays_there() -> None:
    async def test() -> None:
        async with worker() as (client, behind):
            own = (b"X-Hop: 1", b"Proxy-Authorization: s", b"Proxy-Connection: x", b"Expect: 100-continue")
            more = (b"X-A: 1", b"X-A: 2", b"Content-Length: 2")
            await say(client, head(b"/x", b"Connection: close, X-Hop", *own, *more), b"ab")
            assert sorted(behind.headers) == [
                (b"content-length", b"2"),
                (b"host", b"x"),
                (b"x-a", b"1"),
                (b"x-a", b"2"),
            ]
            answer = await client.post("/closing")
            assert answer.status_code == 413 and answer.headers["connection"] == "close"
            assert "x-mine" not in answer.headers and "proxy-authenticate" not in answer.headers

    asyncio.run(test())


def test_a_path_that_cannot_be_listened_on_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "there")
    listener = open_path(path)
    with pytest.raises(StartupError, match="cannot listen on the path"):
        open_path(path)
    listener.close()


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
