"""The state of the pipeline after an event: requests, batches, memory, and what was lost.

`State.apply(event)` is the only way forward and looks at nothing but the event, so the same events give
the same state, live or from a file. `fold` runs a whole recording and keeps the history of the memory.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sgviz.events.schema import (
    AdmitOk,
    BatchFinished,
    BatchLaunched,
    BatchPlanned,
    BatchProcessed,
    Body,
    ChunkSent,
    EngineConfigured,
    Event,
    LoopIdle,
    OutputReceived,
    OutputStreamed,
    PoolReturned,
    PoolTaken,
    ProcessStarted,
    QueueEntered,
    RequestAborted,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRetracted,
    RequestTokenized,
    ResponseFinished,
    TextEmitted,
    TokensSampled,
    TraceDropped,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)
from sgviz.recording.ledger import Ledger
from sgviz.recording.requests import Requests


@dataclass(slots=True)
class BatchState:
    """One batch: its plan, and the stamps of its way (monotonic ns, 0: not yet).

    Attributes:
        cached: prefix tokens of the members admitted with it. tokens: what was sampled, by rid.
        start, end: when the device ran it. finished: when the host took the result. processed: when the
            result was in the requests.
    """

    plan: BatchPlanned
    iteration: int
    planned: int
    cached: int = 0
    launched: int = 0
    start: int = 0
    end: int = 0
    finished: int = 0
    processed: int = 0
    tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """The fold says `folded` where the event `seq` of the scheduler states `stated` (tokens) for `name`."""

    t: int
    seq: int
    kind: str
    bid: int
    name: str
    folded: int
    stated: int


@dataclass(frozen=True, slots=True)
class KvRow:
    """Tokens by state after one event (`t` monotonic ns)."""

    t: int
    iteration: int
    kind: str
    free: int
    evictable: int
    protected: int
    private: int
    total: int
    exact: bool


@dataclass(slots=True)
class State:
    """Everything the readers know after the events so far.

    Attributes:
        missing: events lost in between, by component (gaps in its sequence numbers).
        dropped: sum of the `trace.dropped` events.
    """

    requests: Requests = field(default_factory=Requests)
    batches: dict[int, BatchState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    processes: dict[str, ProcessStarted] = field(default_factory=dict)
    configured: EngineConfigured | None = None
    missing: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    differences: list[Difference] = field(default_factory=list)
    kv_changed: bool = False
    _last_seq: dict[str, int] = field(default_factory=dict)
    _gaps: set[str] = field(default_factory=set)
    _cached: dict[str, int] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Move to the state after `event`."""
        self.kv_changed = False
        self._follow_seq(event)
        handler = _HANDLERS.get(type(event.body))
        if handler is not None:
            handler(self, event, event.body)

    def _follow_seq(self, event: Event) -> None:
        component = event.component
        lost = event.seq - self._last_seq.get(component, 0) - 1
        if lost > 0:
            self.missing[component] = self.missing.get(component, 0) + lost
            self._gaps.add(component)
        if lost >= 0:
            self._last_seq[component] = event.seq

    # ------------------------------------------------------------ engine

    def _on_process(self, event: Event, body: ProcessStarted) -> None:
        self.processes[body.component] = body

    def _on_configured(self, event: Event, body: EngineConfigured) -> None:
        self.configured = body
        self.ledger.configure(body)
        self.kv_changed = True

    def _on_dropped(self, event: Event, body: TraceDropped) -> None:
        self.dropped += body.count

    # ------------------------------------------------------------ batches

    def _on_admitted(self, event: Event, body: AdmitOk) -> None:
        continued = body.need == 0 and body.have == 0
        if continued:
            return
        self._cached[body.rid] = body.prefix
        request = self.requests.of(body.rid)
        if request.cached_tokens is None:
            request.cached_tokens = body.prefix

    def _on_planned(self, event: Event, body: BatchPlanned) -> None:
        cached = sum(self._cached.pop(rid, 0) for rid in body.rids) if self._cached else 0
        self.batches[body.bid] = BatchState(body, event.iteration, event.t, cached)
        self.requests.planned(event, body)
        self._on_stated(event, body)

    def _on_stated(self, event: Event, body: BatchPlanned | LoopIdle) -> None:
        """Numbers that the engine states: the check of the fold, or its new start after a loss."""
        ledger = self.ledger
        self._note_gap(event.component)
        if not ledger.exact:
            ledger.seed(body)
            self.kv_changed = True
            return
        same = self._same(event, "free", ledger.free, body.kv_free)
        same &= self._same(event, "evictable", ledger.evictable, body.kv_evictable)
        same &= self._same(event, "protected", ledger.protected, body.kv_protected)
        if not same:  # told once; what follows is folded from the engine's word
            ledger.seed(body)
            self.kv_changed = True

    def _same(self, event: Event, name: str, folded: int, stated: int) -> bool:
        if folded == stated:
            return True
        bid = event.body.bid if isinstance(event.body, BatchPlanned) else 0
        self.differences.append(Difference(event.t, event.seq, event.kind, bid, name, folded, stated))
        return False

    def _on_launched(self, event: Event, body: BatchLaunched) -> None:
        if batch := self.batches.get(body.bid):
            batch.launched = event.t

    def _on_finished(self, event: Event, body: BatchFinished) -> None:
        if batch := self.batches.get(body.bid):
            batch.start, batch.end, batch.finished = body.start_ns, body.end_ns, event.t
            self.requests.batch_finished(event, body, batch.plan.rids)

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        if batch := self.batches.get(body.bid):
            batch.tokens.update(zip(body.rids, body.token_ids))
        self.requests.sampled(event, body)

    def _on_processed(self, event: Event, body: BatchProcessed) -> None:
        if batch := self.batches.get(body.bid):
            batch.processed = event.t
        self.requests.processed(event, body)

    # ------------------------------------------------------------ memory

    def _note_gap(self, component: str) -> None:
        if component in self._gaps:
            self._gaps.discard(component)
            self.ledger.exact = False

    def _on_memory(self, event: Event, body: Body) -> None:
        self._note_gap(event.component)
        self.kv_changed = self.ledger.apply(body)

    def _on_pool(self, event: Event, body: PoolTaken | PoolReturned) -> None:
        self._on_memory(event, body)
        if self.ledger.exact and not self._same(event, "free", self.ledger.free, body.free):
            self.ledger.exact = False


_HANDLERS: Mapping[type, Callable[[State, Event, Any], None]] = MappingProxyType(
    {
        ProcessStarted: State._on_process,
        EngineConfigured: State._on_configured,
        TraceDropped: State._on_dropped,
        AdmitOk: State._on_admitted,
        BatchPlanned: State._on_planned,
        BatchLaunched: State._on_launched,
        BatchFinished: State._on_finished,
        TokensSampled: State._on_sampled,
        BatchProcessed: State._on_processed,
        LoopIdle: State._on_stated,
        PoolTaken: State._on_pool,
        PoolReturned: State._on_pool,
        TreeInserted: State._on_memory,
        TreeSplit: State._on_memory,
        TreeEvicted: State._on_memory,
        TreeLocked: State._on_memory,
        RequestReceived: lambda state, event, body: state.requests.received(event, body),
        RequestConverted: lambda state, event, body: state.requests.converted(event, body),
        RequestTokenized: lambda state, event, body: state.requests.tokenized(event, body),
        RequestDispatched: lambda state, event, body: state.requests.dispatched(event, body),
        OutputReceived: lambda state, event, body: state.requests.output_received(event, body),
        RequestFinished: lambda state, event, body: state.requests.finished(event, body),
        RequestAborted: lambda state, event, body: state.requests.aborted(event, body),
        ChunkSent: lambda state, event, body: state.requests.chunk_sent(event, body),
        ResponseFinished: lambda state, event, body: state.requests.response_finished(event, body),
        QueueEntered: lambda state, event, body: state.requests.queued(event, body),
        RequestRetracted: lambda state, event, body: state.requests.retracted(event, body),
        OutputStreamed: lambda state, event, body: state.requests.streamed(event, body),
        TextEmitted: lambda state, event, body: state.requests.emitted(event, body),
    }
)


@dataclass(frozen=True, slots=True)
class Folded:
    """The last state and the history of the memory, a row for every event that moved tokens."""

    state: State
    kv: list[KvRow]


def fold(events: Iterable[Event], configured: EngineConfigured | None = None) -> Folded:
    """Fold `events` (in the order of time). `configured`: the engine's sizes, if no event says them."""
    state = State(configured=configured)
    if configured is not None:
        state.ledger.configure(configured)
    rows: list[KvRow] = []
    for event in events:
        state.apply(event)
        if state.kv_changed:
            rows.append(_kv_row(event, state.ledger))
    return Folded(state, rows)


def _kv_row(event: Event, ledger: Ledger) -> KvRow:
    return KvRow(
        event.t, event.iteration, event.kind, ledger.free, ledger.evictable, ledger.protected,
        ledger.private_total, ledger.total, ledger.exact,
    )  # fmt: skip
