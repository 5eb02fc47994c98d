"""The desk of the live page: viewers who leave in the middle of a view do not disturb the fold."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sgviz.events import RingSink
from sgviz.observe.live import ViewDesk
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
