"""The clocks of a run: number of events, wall time, iteration of the loop; and from any of them to a number of events.

A mark every few dozen events says how far both clocks have come, so any place is found by a search among the marks
and a look at the few events behind one. Mirrors nothing of SGLang. Imports: errors, events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sgviz.errors import BadRequest
from sgviz.events.schema import Event

Clock = Literal["event", "ms", "iteration"]
Since = Callable[[int, int], tuple[int, Sequence[Event]]]
MARK_EVERY = 64  # events


@dataclass(frozen=True, slots=True)
class Mark:
    """After `count` events: the latest time (monotonic ns) and iteration that any of them had."""

    count: int
    t: int
    iteration: int

    def on(self, clock: Clock) -> int:
        """Where this clock stands (ns for `ms`)."""
        return {"event": self.count, "ms": self.t, "iteration": self.iteration}[clock]


class Clocks:
    """Fed with every event in the order in which they count; never goes back.

    Attributes:
        newest: after all events so far.
    """

    def __init__(self) -> None:
        self.newest = Mark(0, 0, 0)
        self._marks: list[Mark] = []

    def apply(self, event: Event, count: int) -> None:
        """Event number `count`. Events of several components come a little out of the order of time."""
        before = self.newest if self.newest.count else Mark(count - 1, event.t, 0)
        if not self._marks:
            self._marks.append(before)
        self.newest = Mark(count, max(before.t, event.t), max(before.iteration, event.iteration))
        if count >= self._marks[-1].count + MARK_EVERY:
            self._marks.append(self.newest)

    def forget(self, oldest: int) -> Mark:
        """Drop the marks before event number `oldest`; the earliest place that is left."""
        kept = next((n for n, mark in enumerate(self._marks) if mark.count >= oldest), len(self._marks))
        del self._marks[:kept]
        return self._marks[0] if self._marks else self.newest

    def place(self, t: int) -> int:
        """About how many events there were at `t` (monotonic ns): those up to the mark before it."""
        at = bisect_right(self._marks, t, key=lambda mark: mark.t) - 1
        return self._marks[at].count if at >= 0 else 0

    def count_at(self, clock: Clock, value: float, t0: int, since: Since) -> int:
        """How many events there were when `clock` stood at `value`: all up to that time, or to the end of that turn.

        Args:
            value: a number of events, ms since `t0` (monotonic ns), or an iteration.

        Raises:
            BadRequest: the clock never stood there, as far as is remembered, or no clock can.
        """
        if not math.isfinite(value * 1e6):
            raise BadRequest(f"there is no place {value:g} on a clock", param="at")
        if clock == "event":
            return int(value)
        wanted = t0 + round(value * 1e6) if clock == "ms" else int(value)
        marks = self._marks or [self.newest]
        first = marks[0]
        if not first.on(clock) <= wanted <= self.newest.on(clock):
            low, high = (_told(mark, clock, t0) for mark in (first, self.newest))
            unit = "ms" if clock == "ms" else "iteration"
            raise BadRequest(f"{unit} {value:g} is not between {low:g} and {high:g}, what is remembered")
        at = bisect_right(marks, wanted, key=lambda mark: mark.on(clock)) - 1
        return _scan(marks[at], clock, wanted, since, self.newest.count)


def _scan(mark: Mark, clock: Clock, wanted: int, since: Since, newest: int) -> int:
    """From a mark on, the last place at which the clock has not gone past `wanted`."""
    count = mark.count
    while count < newest:
        first, events = since(count, min(MARK_EVERY, newest - count))
        if not events:
            return newest
        for number, event in enumerate(events):
            if (event.t if clock == "ms" else event.iteration) > wanted:
                return first + number
        count = first + len(events)
    return newest


def _told(mark: Mark, clock: Clock, t0: int) -> float:
    return (mark.t - t0) / 1e6 if clock == "ms" else float(mark.on(clock))
