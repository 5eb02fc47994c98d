"""Streams for a served engine, a wire that can be cut, a reader of events, and what a page costs its browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

import httpx2

PATIENCE_S = 30.0
# each drawing leaves when it was and how long it took; the page itself keeps only the newest
WATCH = """() => { window.drawings = []; const root = document.getElementById("sgviz");
  new MutationObserver(() => window.drawings.push([performance.now(), Number(root.dataset.drawMs)]))
    .observe(root, { attributes: true, attributeFilter: ["data-drawn"] }); }"""


class LoopThread:
    """Runs one coroutine in a thread of its own; `close` cancels it, and raises what it has raised before."""

    def __init__(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._task = self.loop.create_task(main)
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self._task)
        except BaseException as error:  # told by `close`: nobody looks here before
            self._fault = error
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself, and its loop is closed
            self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Streams(LoopThread):
    """So many streamed /generate at any time, one after another. `finished`: that ended as they should."""

    def __init__(self, url: str, count: int) -> None:
        self.open = self.finished = 0
        self._url, self._count = url, count
        super().__init__(self._all())

    async def _all(self) -> None:
        limits = httpx2.Limits(max_connections=self._count)
        async with (
            httpx2.AsyncClient(base_url=self._url, timeout=None, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._count):
                group.create_task(self._one(client, number))

    async def _one(self, client: httpx2.AsyncClient, number: int) -> None:
        for turn in range(1_000_000):
            head = [40 + number % 5] * 32
            body = {
                "input_ids": head + [(number * 31 + turn * 7 + i) % 200 + 20 for i in range(24)],
                "stream": True,
                "sampling_params": {"max_new_tokens": 24 + (number + turn) % 40, "ignore_eos": True},
            }
            async with client.stream("POST", "/generate", json=body) as answer:
                assert answer.status_code == 200
                self.open += 1
                last = [line async for line in answer.aiter_lines() if line][-1]
                self.open -= 1
            assert last == "data: [DONE]"
            self.finished += 1


class Wire(LoopThread):
    """A TCP proxy in front of `url`; `cut` breaks all connections through it."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._ready = threading.Event()
        self._pairs: set[asyncio.StreamWriter] = set()
        self.url = ""
        super().__init__(self._serve())
        assert self._ready.wait(PATIENCE_S)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        async with server:
            try:
                await server.serve_forever()
            finally:
                self._cut()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        ends = (writer, far_writer)
        self._pairs.update(ends)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        self._pairs.difference_update(ends)

    def _cut(self) -> None:
        for each in self._pairs:
            each.transport.abort()

    def cut(self) -> None:
        self.loop.call_soon_threadsafe(self._cut)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


class EventReader(threading.Thread):
    """Follows /sgviz/events as any program may: after a break it goes on behind the last number it has seen.

    `jumps`: where the numbers did not go on by one. `breaks`: connections that broke.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.seen = self.breaks = 0
        self.jumps: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError, ValueError):  # broken, perhaps within a line
                self._follow()
            self.breaks += not self._ended.is_set()

    def _follow(self) -> None:
        request = urllib.request.Request(
            f"{self._url}/sgviz/events", headers={"Last-Event-ID": str(self.seen)}
        )
        number = 0
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as stream:
            for line in stream:
                if self._ended.is_set():
                    return
                if line.startswith(b"id: "):
                    number = int(line[4:])
                elif line.startswith(b"data: "):
                    first = number - len(json.loads(line[6:]))
                    if first != self.seen:
                        self.jumps.append((self.seen, first))
                    self.seen = number

    def end(self) -> None:
        self._ended.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()


class PageCost:
    """Memory of a page after a collection, as Chromium counts it."""

    def __init__(self, page: Any) -> None:
        self._link = page.context.new_cdp_session(page)
        self._link.send("Performance.enable")

    def heap_mib(self) -> float:
        return self._after_collection("JSHeapUsedSize") / 2**20

    def nodes(self) -> float:
        """DOM nodes, those that only JavaScript still holds among them."""
        return self._after_collection("Nodes")

    def _after_collection(self, name: str) -> float:
        self._link.send("HeapProfiler.collectGarbage")
        found = self._link.send("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in found if metric["name"] == name)
