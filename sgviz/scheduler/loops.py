"""The event loops, as twin generators that differ only in whose result is processed (facts 5.4).

Each yields at named stops and never waits itself: a server drains it and blocks at IDLE, a debugger
advances it stop by stop. A batch whose sampling must know the result before it (`OverlapRules`) is launched without
sampling, and sampled when that result is in. Imports: the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sgviz.scheduler.stops import Stop

if TYPE_CHECKING:
    from sgviz.scheduler.scheduler import Scheduler


def event_loop_normal(scheduler: Scheduler) -> Iterator[Stop]:
    """Launch a batch, wait for it, process it; then plan the next."""
    while scheduler.begin_turn():
        yield Stop.RECEIVED
        batch = scheduler.plan()
        yield Stop.PLANNED
        if batch is not None:
            launched = scheduler.launch(batch)
            yield Stop.LAUNCHED
            scheduler.process(launched)
            yield Stop.PROCESSED
        else:
            scheduler.on_idle()
            yield Stop.IDLE


def event_loop_overlap(scheduler: Scheduler) -> Iterator[Stop]:
    """Launch a batch, process the result of the one before while it runs; then plan the next."""
    pending = None
    while scheduler.begin_turn():
        yield Stop.RECEIVED
        batch = scheduler.plan()
        yield Stop.PLANNED
        if pending is not None and scheduler.must_process_first(pending, batch):
            scheduler.process(pending)
            yield Stop.PROCESSED
            pending = None
        launched = None
        if batch is not None:
            launched = scheduler.launch(batch)
            yield Stop.LAUNCHED
        if pending is not None:
            scheduler.process(pending)
            yield Stop.PROCESSED
        elif launched is None:
            scheduler.on_idle()
            yield Stop.IDLE
        if launched is not None:
            launched.launch.sample()  # goes on where it was held back, else nothing
        pending = launched
    if pending is not None:
        scheduler.process(pending)
        yield Stop.PROCESSED
