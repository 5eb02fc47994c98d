"""A recording: events, live or from a file, and everything that follows from them.

The reader's face of a run. It replaces what one would gather from SGLang's log lines, metrics and dumps;
every table is folded from the same events, so two tables of a recording never contradict each other.

Imports: events, errors, recording, pandas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pandas as pd

from sgviz.errors import BadRequest, NotFound, suggest
from sgviz.events.schema import EngineConfigured, Event, ProcessStarted, TraceDropped
from sgviz.events.time_stats import Stage, TimeStats, stages
from sgviz.recording import tables
from sgviz.recording.audit import AuditReport, audit
from sgviz.recording.decisions import decisions_table, tokens_table
from sgviz.recording.engine_fold import Difference
from sgviz.recording.explain import Explainer
from sgviz.recording.explanation import Explanation
from sgviz.recording.fold import Folded, State
from sgviz.recording.journey import TypeStep, journey
from sgviz.recording.moment import Moment, moment
from sgviz.recording.requests import RequestState
from sgviz.recording.store import ClockAnchor, Header, StoredRun, UnknownEvent, read, write
from sgviz.recording.waits import kv_owners_table, waits_table, why_not_running


def load(path: str | os.PathLike[str]) -> Recording:
    """Open a `.sgv` file. A tail cut by a crash is left out (see `Recording.truncated`).

    Raises:
        SgvizError: no such file, not a recording, header cut off, or written by a newer schema.
    """
    run = read(path)
    return Recording(
        run.events, run.header, unknown=run.unknown, truncated=run.truncated, source=os.path.basename(path)
    )


class Recording:
    """What happened, as tables.

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
        self._total: Callable[[], int] | None = None
        self._lost: Callable[[], int] | None = None
        self._seen = -1
        self._folded: Folded | None = None
        self._explainer: Explainer | None = None
        self._tables: dict[str, pd.DataFrame] = {}

    @classmethod
    def live(
        cls,
        snapshot: Callable[[], list[Event]],
        header: Header | None = None,
        *,
        total: Callable[[], int] | None = None,
        dropped: Callable[[], int] | None = None,
    ) -> Recording:
        """A recording that is brought up to date whenever it is looked at.

        Args:
            snapshot: all events so far, in the order of time (`RingSink.snapshot`).
            total: a number that grows with every event; spares the snapshot when nothing came.
            dropped: events lost for good, those that fell out of the ring among them.
        """
        recording = cls((), header, source="live")
        recording._snapshot, recording._total, recording._lost = snapshot, total, dropped
        return recording

    def refresh(self) -> Recording:
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

    def freeze(self) -> Recording:
        """This moment of a live recording, for several looks at the same state."""
        self.refresh()
        if self._snapshot is None:
            return self
        frozen = Recording(self._events, self._full_header(), unknown=self._unknown, source=self.source)
        frozen._tables, frozen._lost = dict(self._tables), self._lost
        frozen._folded, self._folded = self._folded, None  # it belongs to one: the live one goes on
        return frozen

    # ------------------------------------------------------------ tables

    @property
    def events(self) -> pd.DataFrame:
        """One row an event: stamps, component, kind, whose it is, its fields; see `tables.events_table`."""
        return self._table("events", lambda: tables.events_table(self._events, self._unknown, self.t0))

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request: sizes, latencies and stages; see `tables.requests_table`."""
        return self._table(
            "requests", lambda: tables.requests_table(self._requests().values(), self.t0, self.explainer())
        )

    @property
    def iterations(self) -> pd.DataFrame:
        """One row a scheduler iteration that planned a batch; see `tables.iterations_table`."""
        return self._table("iterations", lambda: tables.iterations_table(self._state, self.t0))

    @property
    def batches(self) -> pd.DataFrame:
        """One row a member of a batch: bid, iteration, mode, member, rid, lengths, token; see `tables`."""
        return self._table("batches", lambda: tables.batches_table(self._state, self.t0))

    @property
    def kv(self) -> pd.DataFrame:
        """KV tokens by state over time, folded from `pool.*` and `tree.*`; see `tables.kv_table`."""
        return self._table("kv", lambda: tables.kv_table(self._fold().kv, self.t0))

    @property
    def decisions(self) -> pd.DataFrame:
        """One row a verdict of admission, repeats folded; see `decisions.decisions_table`."""
        return self._table("decisions", lambda: decisions_table(self._events, self.t0))

    @property
    def tokens(self) -> pd.DataFrame:
        """One row a sampled token, with its times on the way out; see `decisions.tokens_table`."""
        return self._table("tokens", lambda: tokens_table(self._events, self.t0))

    @property
    def waits(self) -> pd.DataFrame:
        """One row a request: its whole time by cause, a column each; see `waits.waits_table`."""
        return self._table("waits", lambda: waits_table(self.explainer(), self._requests().values()))

    @property
    def kv_owners(self) -> pd.DataFrame:
        """Private KV tokens by owner at up to 400 moments; see `waits.kv_owners_table`."""
        return self._table("kv_owners", lambda: kv_owners_table(self._events, self._configured(), self.t0))

    def stamped(self) -> Sequence[Event]:
        """The events themselves, in the order of time, for folds that are no table."""
        self.refresh()
        return self._events

    def events_of(self, rid: str) -> pd.DataFrame:
        """The rows of `events` that name the request, as their subject or among others."""
        self.request(rid)
        chosen = [event for event in self._events if _names(event, rid)]
        return tables.events_table(chosen, (), self.t0)

    # ------------------------------------------------------------ one request

    @property
    def rids(self) -> list[str]:
        """All requests in the order of their first event."""
        self.refresh()
        return list(self._requests())

    def request(self, rid: str) -> RequestState:
        """The folded request.

        Raises:
            NotFound: the recording has no such rid.
        """
        self.refresh()
        found = self._requests().get(rid)
        if found is None:
            known = self._requests()
            raise NotFound(f"no request {rid!r} among the {len(known)} recorded{suggest(rid, known)}")
        return found

    def journey(self, rid: str) -> list[TypeStep]:
        """The types that carried the request, from the HTTP body to the first text sent."""
        return journey(self._state_now(), self.request(rid))

    def time_stats(self, rid: str) -> TimeStats:
        """The stamps of the request (monotonic ns), under the names the engine uses."""
        return self.request(rid).stats

    def stages(self, rid: str) -> list[Stage]:
        """The stages of the request end to end; their sum is its whole time."""
        return stages(self.time_stats(rid))

    # ------------------------------------------------------------ why

    def explain(self, rid: str) -> Explanation:
        """Where the request's time went: intervals with causes and names that lie end to end.

        Raises:
            NotFound: the recording has no such rid.
        """
        request = self.request(rid)
        return self.explainer().explain(request)

    def explainer(self) -> Explainer:
        """What explains requests of this recording one after the other; computed once."""
        self.refresh()
        if self._explainer is None:
            self._explainer = Explainer(self._events, self._state, self.t_end)
        return self._explainer

    def why_not_running(self, at: float | None = None, *, iteration: int | None = None) -> pd.DataFrame:
        """Each request that waits at a moment, in the order of the queue, with cause, blockers and numbers.

        Args:
            at: ms since the first event; None (and no `iteration`): now, the end of the recording.
        """
        moment = self.at(iteration=iteration, time=at)
        return why_not_running(self.explainer(), moment, self._requests(), self.t0)

    def at(
        self, *, iteration: int | None = None, time: float | None = None, count: int | None = None
    ) -> Moment:
        """The state at a moment: queue, running batch, pools, radix tree. Without arguments: the end.

        Args:
            iteration: after everything that happened up to the end of this turn of the loop.
            time: ms since the first event, like the tables' `t_ms`. count: after so many events.

        Raises:
            BadRequest: more than one is given, or the recording has no such moment.
        """
        self.refresh()
        keyframes, events = self._fold().keyframes, self._events
        if sum(given is not None for given in (iteration, time, count)) > 1:
            raise BadRequest("at() takes one of iteration, time and count, not several")
        if iteration is not None:
            count = keyframes.count_until_iteration(events, iteration)
        elif time is not None:
            count = keyframes.count_until_time(events, self.t0 + round(time * 1e6))
        elif count is None:
            count = len(events)
        if not 0 <= count <= len(events):
            raise BadRequest(f"count {count} is not between 0 and the {len(events)} events recorded")
        return moment(keyframes.after(events, count), count, self.t0)

    # ------------------------------------------------------------ the whole

    @property
    def t0(self) -> int:
        """Monotonic ns of the first event (0: there is none)."""
        starts = [run[0].t for run in (self._events, self._unknown) if run]
        return min(starts, default=0)

    @property
    def t_end(self) -> int:
        """Monotonic ns of the last event (0: there is none)."""
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

    def audit(self) -> AuditReport:
        """Balance the books from the events alone; a finding names the event that breaks them."""
        self.refresh()
        return audit(self._events, self.header.configured)

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

    def __repr__(self) -> str:
        counts = f"{len(self)} events, {len(self.rids)} requests, {self.dropped} dropped"
        return f"<Recording {self.source}: {counts}>"

    # ------------------------------------------------------------ inside

    def _fold(self) -> Folded:
        if self._folded is None:
            self._folded = Folded(self.header.configured).extend(self._events)
        return self._folded

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

    def _table(self, name: str, build: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        self.refresh()
        if name not in self._tables:
            self._tables[name] = build()
        return self._tables[name].copy()

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
            configured=self._state.configured or self.header.configured,
        )


def _names(event: Event, rid: str) -> bool:
    body = event.body
    return getattr(body, "rid", None) == rid or rid in getattr(body, "rids", ())
