"""Stepping back: earlier states from the recording, while the engine stands where it stands. Imports: recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sgviz.errors import BadRequest, Unavailable, suggest
from sgviz.events import Event
from sgviz.messages.debug import Where
from sgviz.recording import Moment, Recording
from sgviz.scheduler.gate.vocabulary import DECISIONS

UNITS = ("event", "decision", "iteration")
PATIENCE_S = 5.0  # events of another process arrive a little later than the news that it is parked


class Past:
    """A place in the recording, counted in events from its beginning."""

    def __init__(self, recording: Callable[[], Recording | None], where: Callable[[], Where | None]) -> None:
        self._recording = recording
        self._where = where
        self._stop_no = -1
        self._count = 0

    def move(self, what: str, steps: int) -> Moment:
        """Move by so many `what`, forwards or back, within the recording.

        Raises:
            BadRequest: no such unit. Unavailable: it is not parked, there is no recording, or it does not reach so far.
        """
        if what not in UNITS:
            raise BadRequest(f"{what!r} is not one of {', '.join(UNITS)}{suggest(what, UNITS)}")
        where, recording = self._where(), self._recording()
        if where is None:
            raise Unavailable("the scheduler is running; its past is in the recording, this one needs a stop")
        if recording is None:
            raise Unavailable("there is no recording of this engine to step back in")
        recording = recording.rank(0)  # the debugger stops the first scheduler
        events = _up_to(recording, where)
        if where.stop_no != self._stop_no:
            self._stop_no, self._count = where.stop_no, len(events)
        for _ in range(abs(steps)):
            self._count = _moved(events, self._count, what, 1 if steps > 0 else -1)
        return recording.at(count=self._count)


def _up_to(recording: Recording, where: Where) -> Sequence[Event]:
    """The recording's events, once the one at which it is parked has arrived. Raises Unavailable if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        events = recording.stamped()
        newest = next((event.seq for event in reversed(events) if event.component == "scheduler"), 0)
        if newest >= where.seq:
            return events
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the recording ends at the scheduler's event {newest}, and it is parked at {where.seq}; "
                f"the events between have not come within {PATIENCE_S:g} s"
            )
        time.sleep(0.02)


def _moved(events: Sequence[Event], count: int, what: str, by: int) -> int:
    """The next place in that direction: behind a scheduler's event, a decision, or the last event of an iteration."""
    at = count + by
    while 0 < at < len(events):
        event = events[at - 1]
        if event.component == "scheduler":
            if what == "event" or (what == "decision" and event.kind in DECISIONS):
                return at
            if what == "iteration" and _ends_iteration(events, at):
                return at
        at += by
    return min(max(at, 0), len(events))


def _ends_iteration(events: Sequence[Event], at: int) -> bool:
    """Whether the next event of the scheduler is of a later iteration."""
    behind = (events[place] for place in range(at, len(events)))
    later = next((event for event in behind if event.component == "scheduler"), None)
    return later is not None and later.iteration > events[at - 1].iteration
