"""Follower: the state of a run that goes on, folded as events come, with bounded memory; and any state it remembers.

A `Recording` folds what it holds from its beginning; this one only goes forward, forgets requests and batches that
are long over, and keeps copies of the engine's state to jump back to. Events count in the order in which they came,
as in `GET /sgviz/events`, so a number names one state for ever. Imports: events, errors, recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgviz.errors import BadRequest
from sgviz.events.schema import Event
from sgviz.recording.engine_fold import EngineFold
from sgviz.recording.fold import State
from sgviz.recording.keyframes import KEYFRAME_EVERY
from sgviz.recording.moment import Moment, moment
from sgviz.recording.page_map import PageMap

PIECE = 8192  # events taken at once
MAX_REQUESTS = 512  # requests remembered; those that live are never forgotten
MAX_BATCHES = 256

Since = Callable[[int, int], tuple[int, Sequence[Event]]]


@dataclass(frozen=True, slots=True)
class Past:
    """The engine and its pages after `count` events."""

    count: int
    engine: EngineFold
    pages: PageMap


class Follower:
    """Folds what `since(count, most)` gives: the events from number `count` on, and the number of the first.

    Attributes:
        count: events so far, those lost before the beginning among them. state, pages: after them.
        lost: events that were gone before they could be taken.
    """

    def __init__(self, since: Since, start: State | None = None) -> None:
        self._since = since
        self.state = start or State()
        self.pages = PageMap()
        if self.state.configured is not None:
            self.pages.apply(Event(0, 0, "", 0, self.state.configured))
        self.count = 0
        self.lost = 0
        self.t0 = 0
        self._past = [Past(0, self.state.engine.copy(), self.pages.copy())]

    def advance(self) -> list[Event]:
        """Take all that is new; returns it."""
        taken: list[Event] = []
        while True:
            first, events = self._since(self.count, PIECE)
            self.lost += first - self.count
            if not events:
                self.count = first
                return taken
            self._fold(first, events)
            taken += events

    def at(self, count: int | None = None) -> Past:
        """The engine and its pages after `count` events (None: now). What is given is the caller's own.

        Raises:
            BadRequest: that many have not come, or the events to fold it from are forgotten.
        """
        if count is None or count == self.count:
            return Past(self.count, self.state.engine.copy(), self.pages.copy())
        base = next((past for past in reversed(self._past) if past.count <= count), None)
        if base is None or not 0 <= count <= self.count:
            raise BadRequest(f"seq {count} is not between {self.oldest} and {self.count}, what is remembered")
        engine, pages = base.engine.copy(), base.pages.copy()
        at = base.count
        while at < count:
            first, events = self._since(at, min(PIECE, count - at))
            if first != at or not events:
                raise BadRequest(f"seq {count} is no longer remembered")
            for event in events:
                engine.apply(event)
                pages.apply(event)
            at += len(events)
        return Past(count, engine, pages)

    def moment(self, count: int | None = None) -> Moment:
        """`at` as a moment to look at. Raises BadRequest as `at` does."""
        past = self.at(count)
        return moment(past.engine, past.count, self.t0)

    @property
    def oldest(self) -> int:
        """The smallest count that `at` can give."""
        self._forget()
        return self._past[0].count if self._past else self.count

    def _fold(self, first: int, events: Sequence[Event]) -> None:
        self.t0 = self.t0 or events[0].t
        self.count = first
        for event in events:
            self.state.apply(event)
            self.pages.apply(event)
            self.count += 1
            if self.count >= self._past[-1].count + KEYFRAME_EVERY:
                self._past.append(Past(self.count, self.state.engine.copy(), self.pages.copy()))
        self._forget()

    def _forget(self) -> None:
        """Drop states whose events are gone, and requests and batches that are long over."""
        first, _ = self._since(0, 0)
        while len(self._past) > 1 and self._past[0].count < first:
            del self._past[0]
        batches, requests = self.state.batches, self.state.requests
        for bid in list(batches)[: max(0, len(batches) - MAX_BATCHES)]:
            if batches[bid].processed:
                del batches[bid]
        for known in (requests.by_rid, requests.probes):
            for rid in list(known)[: max(0, len(known) - MAX_REQUESTS)]:
                if known[rid].end or known[rid].stats.completion:
                    del known[rid]
        del self.state.engine.differences[:-MAX_BATCHES]
