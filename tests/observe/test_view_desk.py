"""The desk of the live page: viewers who leave in the middle of a view do not disturb the fold."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from sgviz.events import RingSink
from sgviz.observe.live import ViewDesk, view_stream
from sgviz.recording import Recording
from sgviz.viz.views import LiveViews, Wanted


def test_a_view_that_is_given_up_folds_alone_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled viewer gives up its turn at once, its thread goes on folding: the next must wait for that."""
    ring, inside, most, go = RingSink(10), [0], [0], threading.Event()
    real = LiveViews.refresh

    def refresh(views: LiveViews) -> bool:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        assert go.wait(20)
        inside[0] -= 1
        return real(views)

    async def run() -> None:
        desk = ViewDesk(ring, lambda: Recording.live(ring.snapshot, since=ring.since), None)  # type: ignore[arg-type]
        given_up = asyncio.create_task(desk.view(Wanted()))
        while not inside[0]:
            await asyncio.sleep(0.001)
        given_up.cancel()
        await asyncio.wait([given_up])
        next_one = asyncio.create_task(desk.view(Wanted()))
        await asyncio.sleep(0.1)
        go.set()
        assert (await next_one)[0] == 0

    monkeypatch.setattr(LiveViews, "refresh", refresh)
    asyncio.run(run())
    assert most == [1]


def test_a_reader_who_is_slow_is_no_reason_to_tell_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest before the next view is long where the view took long, not where its reader did."""
    now, took = [0.0], []
    monkeypatch.setattr("sgviz.observe.live.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sgviz.observe.live.pause", lambda took_s: took.append(took_s) or 0.0)

    class Desk:
        total = 0

        async def view(self, wanted: Wanted) -> tuple[int, bytes]:
            now[0] += 0.25
            return self.total, b"{}"

    async def run() -> None:
        desk = Desk()
        app = SimpleNamespace(state=SimpleNamespace(ending=False))
        scope = {"type": "http", "query_string": b"", "headers": [], "app": app}
        request = Request(scope, lambda: asyncio.sleep(3600))  # type: ignore[arg-type,return-value]
        stream = await view_stream(desk, request)  # type: ignore[arg-type]
        for desk.total in range(4):
            await anext(stream)
            now[0] += 60.0  # the reader
        desk.total += 1
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert took == [0.0, *[0.25] * 4]
