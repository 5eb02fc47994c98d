"""Where a recording's events come from and how they are folded: live, from a file, frozen at a moment.

What is derived once (fold, explainer, tables) is kept here until new events come.

Imports: events, recording, pandas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Self

import pandas as pd

from sgviz.events.schema import EngineConfigured, Event, ProcessStarted, TraceDropped
from sgviz.recording.engine_fold import Difference
from sgviz.recording.explain import Explainer
from sgviz.recording.fold import Folded, State
from sgviz.recording.requests import RequestState
from sgviz.recording.store import ClockAnchor, Header, Progress, StoredRun, UnknownEvent, no_gc, write

PIECE = 65_536  # events folded between two words of progress


class Source:
    """The events of a run and what follows from them once.

    Args:
        events: in the order of `(t, component, seq)`. header: as in a file.
        unknown: events this version cannot read; they count, are listed and saved again.
        truncated: bytes at the end of the file that were no whole event (0: none).
        source: where it comes from, for titles.
    """

    def __init__(
        self,
        events: Sequence[Event],
        header: Header | None = None,
        *,
        unknown: Sequence[UnknownEvent] = (),
        truncated: int = 0,
        source: str = "events",
    ) -> None:
        self.header = header or Header()
        self.truncated = truncated
        self.source = source
        self._events = events
        self._unknown = unknown
        self._snapshot: Callable[[], list[Event]] | None = None
        self._since: Callable[[int, int], tuple[int, Sequence[Event]]] | None = None
        self._total: Callable[[], int] | None = None
        self._lost: Callable[[], int] | None = None
        self._seen = -1
        self.progress: Progress | None = None
        self._folded: Folded | None = None
        self._explainer: Explainer | None = None
        self._tables: dict[str, pd.DataFrame] = {}
        self._span: Callable[[], tuple[int, int]] | None = None  # first and last stamp, if not its events'

    @classmethod
    def live(
        cls,
        snapshot: Callable[[], list[Event]],
        header: Header | None = None,
        *,
        total: Callable[[], int] | None = None,
        dropped: Callable[[], int] | None = None,
        since: Callable[[int, int], tuple[int, Sequence[Event]]] | None = None,
    ) -> Self:
        """A recording that is brought up to date whenever it is looked at.

        Args:
            snapshot: all events so far, in the order of time (`RingSink.snapshot`).
            total: a number that grows with every event; spares the snapshot when nothing came.
            dropped: events lost for good, those that fell out of the ring among them.
            since: events as they came, from a number on (`RingSink.since`); spares the snapshot to who follows.
        """
        recording = cls((), header, source="live")
        recording._snapshot, recording._total, recording._lost = snapshot, total, dropped
        recording._since = since
        return recording

    def refresh(self) -> Self:
        """Take the newest events (a live recording does so by itself); returns itself."""
        if self._snapshot is None:
            return self
        seen = self._total() if self._total else -1
        if seen >= 0 and seen == self._seen:
            return self
        self._take(self._snapshot())
        self._seen = seen
        return self

    def _take(self, events: Sequence[Event]) -> None:
        """Go on with `events`: fold only what is new, unless something came or went in between."""
        old, known = self._events, len(self._events)
        if len(events) == known and (not known or events[-1] is old[-1]):
            return
        grown = 0 < known <= len(events) and events[0] is old[0] and events[known - 1] is old[-1]
        self._events, self._tables, self._explainer = events, {}, None
        if grown and self._folded is not None:
            self._folded.extend(events[known:])
        else:
            self._folded = None

    def freeze(self) -> Self:
        """This moment of a live recording, for several looks at the same state."""
        self.refresh()
        if self._snapshot is None:
            return self
        frozen = type(self)(self._events, self._full_header(), unknown=self._unknown, source=self.source)
        frozen._tables = dict(self._tables)  # what was dropped until now stands in its header
        frozen._folded, self._folded = self._folded, None  # it belongs to one: the live one goes on
        return frozen

    def stamped(self) -> Sequence[Event]:
        """The events themselves, in the order of time, for folds that are no table."""
        self.refresh()
        return self._events

    def since(self, count: int, most: int) -> tuple[int, Sequence[Event]]:
        """At most `most` events from number `count` on, in the order in which they came; and the number of the first.

        A file has them in the order of time. More came before than `count` if some are no longer there.
        """
        if self._since is not None:
            return self._since(count, most)
        events = self.stamped()
        return count, events[count : count + most]

    def sibling(self) -> Self:
        """A live recording of the same events with a state of its own, for another thread; of a file, itself."""
        if self._snapshot is None:
            return self
        other = type(self).live(
            self._snapshot, self.header, total=self._total, dropped=self._lost, since=self._since
        )
        other.source = self.source
        return other

    @property
    def is_live(self) -> bool:
        """Whether events still come."""
        return self._snapshot is not None

    @property
    def t0(self) -> int:
        """Monotonic ns of the first event (0: there is none)."""
        if self._span is not None:
            return self._span()[0]
        starts = [run[0].t for run in (self._events, self._unknown) if run]
        return min(starts, default=0)

    @property
    def t_end(self) -> int:
        """Monotonic ns of the last event (0: there is none)."""
        if self._span is not None:
            return self._span()[1]
        return max((run[-1].t for run in (self._events, self._unknown) if run), default=0)

    @property
    def dropped(self) -> int:
        """Events known to be lost: before the first one, and reported by `trace.dropped`."""
        self.refresh()
        if self._lost is not None:
            return self._lost()
        return self.header.dropped + self._state.dropped

    @property
    def missing(self) -> dict[str, int]:
        """Gaps in the sequence numbers, by component."""
        return dict(self._state_now().missing)

    @property
    def unknown(self) -> dict[str, int]:
        """Events of kinds (or with values) that this version cannot read, counted by kind."""
        counts: dict[str, int] = {}
        for event in self._unknown:
            counts[event.kind] = counts.get(event.kind, 0) + 1
        return counts

    def check(self) -> list[Difference]:
        """Where the folded memory differs from what `batch.planned`, `loop.idle` and `pool.*` state.

        Empty when the events tell the whole story. After a loss of events nothing is compared until a
        batch has stated its numbers, from which the fold then goes on.
        """
        return list(self._state_now().differences)

    def fold(self) -> Folded:
        """The last state and the history of the memory."""
        self.refresh()
        return self._fold()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.sgv` file (replacing one of that name when all is written)."""
        self.refresh()
        write(path, StoredRun(self._full_header(), list(self._events), list(self._unknown), 0))

    def __len__(self) -> int:
        self.refresh()
        return len(self._events) + len(self._unknown)

    def _fold(self) -> Folded:
        if self._folded is None:
            self._folded = self._fold_all()
        return self._folded

    def _fold_all(self) -> Folded:
        """From the beginning, in pieces between which progress is told."""
        folded, total = Folded(self.header.configured), len(self._events)
        for start in range(0, total, PIECE):
            with no_gc():
                folded.extend(self._events[start : start + PIECE])
            if self.progress is not None:
                self.progress("fold", min(start + PIECE, total), total)
        return folded

    @property
    def _state(self) -> State:
        return self._fold().state

    def _state_now(self) -> State:
        self.refresh()
        return self._state

    def _configured(self) -> EngineConfigured | None:
        return self._state.configured or self.header.configured

    def _requests(self) -> dict[str, RequestState]:
        return self._state.requests.by_rid

    def _full_header(self) -> Header:
        """The header with what the events say beyond it: anchors, sizes, losses before the first event."""
        started = [event.body for event in self._events if isinstance(event.body, ProcessStarted)]
        told = sum(event.body.count for event in self._events if isinstance(event.body, TraceDropped))
        anchors = {anchor.component: anchor for anchor in self.header.anchors}
        anchors |= {
            body.component: ClockAnchor(
                component=body.component, pid=body.pid, unix_ns=body.unix_ns, monotonic_ns=body.monotonic_ns
            )
            for body in started
        }
        return Header(
            clock=self.header.clock,
            created_unix_ns=self.header.created_unix_ns,
            settings=self.header.settings,
            anchors=tuple(anchors.values()),
            dropped=self.dropped - told,
            configured=self._configured(),
        )
