"""The state of the pipeline after an event: requests, batches, memory, and what was lost.

`State.apply(event)` is the only way forward and looks at nothing but the event, so the same events give
the same state, live or from a file. `Folded` runs a recording, also piece by piece, and keeps the history of
the memory and the keyframes to jump by.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from sgviz.events.schema import (
    AdmitOk,
    BatchFinished,
    BatchLaunched,
    BatchPlanned,
    BatchProcessed,
    ChunkSent,
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    DpChose,
    DpRankChanged,
    EmbeddingsPooled,
    EngineConfigured,
    Event,
    GrammarQueued,
    GrammarReady,
    OutputReceived,
    OutputStreamed,
    ProcessStarted,
    QueueEntered,
    RequestAborted,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRefused,
    RequestRetracted,
    RequestTokenized,
    ResponseFinished,
    RouterPaired,
    SessionTurn,
    TextEmitted,
    TokensSampled,
)
from sgviz.recording import controller_part, disagg_phases, routes
from sgviz.recording.engine_fold import Difference, EngineFold
from sgviz.recording.keyframes import KEYFRAME_EVERY, Keyframes
from sgviz.recording.ledger import Ledger
from sgviz.recording.requests import Requests


@dataclass(slots=True)
class BatchState:
    """One batch: its plan, and the stamps of its way (monotonic ns, 0: not yet).

    Attributes:
        cached: prefix tokens of the members admitted with it. tokens: what was sampled, by rid.
        start, end: when the device ran it. forward_end, sample_start, copy_start, copy_end: its parts, where the
            device tells; see `batch.finished`.
        finished: when the host took the result. processed: when the result was in the requests. turn: when the
            turn of the loop that launched it began. waited: since when the scheduler's thread waited for the result.
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
    turn: int = 0
    waited: int = 0
    forward_end: int = 0
    sample_start: int = 0
    copy_start: int = 0
    copy_end: int = 0

    @property
    def forward(self) -> tuple[int, int]:
        """When the device computed the logits; with the sampling where it does not tell them apart."""
        return self.start, self.forward_end or self.end

    @property
    def sampling(self) -> tuple[int, int]:
        """When the device sampled; `(end, end)` where it does not tell."""
        return self.sample_start or self.end, self.end


class KvRow(NamedTuple):
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
    """Everything the readers know after the events so far: the engine's own state, and all that went by."""

    engine: EngineFold = field(default_factory=EngineFold)
    requests: Requests = field(default_factory=Requests)
    batches: dict[int, BatchState] = field(default_factory=dict)
    processes: dict[str, ProcessStarted] = field(default_factory=dict)
    _cached: dict[str, int] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Move to the state after `event`."""
        self.engine.apply(event)
        handler = _HANDLERS.get(type(event.body))
        if handler is not None:
            handler(self, event, event.body)

    @property
    def ledger(self) -> Ledger:
        return self.engine.ledger

    @property
    def configured(self) -> EngineConfigured | None:
        return self.engine.configured

    @property
    def missing(self) -> dict[str, int]:
        return self.engine.missing

    @property
    def dropped(self) -> int:
        return self.engine.dropped

    @property
    def differences(self) -> list[Difference]:
        return self.engine.differences

    def _on_process(self, event: Event, body: ProcessStarted) -> None:
        self.processes[body.component] = body

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

    def _on_launched(self, event: Event, body: BatchLaunched) -> None:
        if batch := self.batches.get(body.bid):
            batch.launched, batch.turn = event.t, body.turn_ns

    def _on_finished(self, event: Event, body: BatchFinished) -> None:
        if batch := self.batches.get(body.bid):
            batch.start, batch.end, batch.finished = body.start_ns, body.end_ns, event.t
            batch.waited = body.wait_ns
            batch.forward_end, batch.sample_start = body.forward_end_ns, body.sample_start_ns
            batch.copy_start, batch.copy_end = body.copy_start_ns, body.copy_end_ns
            self.requests.batch_finished(event, body, batch.plan.rids)

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        if batch := self.batches.get(body.bid):
            batch.tokens.update(zip(body.rids, body.token_ids))
        self.requests.sampled(event, body)

    def _on_processed(self, event: Event, body: BatchProcessed) -> None:
        if batch := self.batches.get(body.bid):
            batch.processed = event.t
        self.requests.processed(event, body)


_HANDLERS: Mapping[type, Callable[[State, Event, Any], None]] = MappingProxyType(
    {
        ProcessStarted: State._on_process,
        AdmitOk: State._on_admitted,
        BatchPlanned: State._on_planned,
        BatchLaunched: State._on_launched,
        BatchFinished: State._on_finished,
        TokensSampled: State._on_sampled,
        BatchProcessed: State._on_processed,
        EmbeddingsPooled: lambda state, event, body: state.requests.pooled(event, body),
        RequestReceived: lambda state, event, body: state.requests.received(event, body),
        RequestConverted: lambda state, event, body: state.requests.converted(event, body),
        RequestTokenized: lambda state, event, body: state.requests.tokenized(event, body),
        RequestDispatched: lambda state, event, body: state.requests.dispatched(event, body),
        DpChose: lambda state, event, body: controller_part.chose(state.requests, event, body),
        DpRankChanged: lambda state, event, body: controller_part.rank_changed(state.requests, event, body),
        RouterPaired: lambda state, event, body: routes.paired(state.requests, event, body),
        OutputReceived: lambda state, event, body: state.requests.output_received(event, body),
        RequestFinished: lambda state, event, body: state.requests.finished(event, body),
        RequestRefused: lambda state, event, body: state.requests.refused(event, body),
        RequestAborted: lambda state, event, body: state.requests.aborted(event, body),
        ChunkSent: lambda state, event, body: state.requests.chunk_sent(event, body),
        ResponseFinished: lambda state, event, body: state.requests.response_finished(event, body),
        GrammarQueued: lambda state, event, body: state.requests.grammar_queued(event, body),
        GrammarReady: lambda state, event, body: state.requests.grammar_ready(event, body),
        SessionTurn: lambda state, event, body: state.requests.session_turn(event, body),
        QueueEntered: lambda state, event, body: state.requests.queued(event, body),
        RequestRetracted: lambda state, event, body: state.requests.retracted(event, body),
        OutputStreamed: lambda state, event, body: state.requests.streamed(event, body),
        TextEmitted: lambda state, event, body: state.requests.emitted(event, body),
        DisaggQueued: lambda state, event, body: disagg_phases.queued(state.requests, event, body),
        DisaggBootstrapped: lambda state, event, body: disagg_phases.bootstrapped(
            state.requests, event, body
        ),
        DisaggPreallocated: lambda state, event, body: disagg_phases.preallocated(
            state.requests, event, body
        ),
        DisaggTransferred: lambda state, event, body: disagg_phases.transferred(state.requests, event, body),
    }
)


class Folded:
    """A fold that goes on with every `extend`: the last state, the history of the memory, and keyframes.

    Attributes:
        kv: a row for every event that moved tokens. keyframes: copies of the engine's state on the way.
        count: events folded.
    """

    def __init__(self, configured: EngineConfigured | None = None, every: int = KEYFRAME_EVERY) -> None:
        self.state = State()
        if configured is not None:
            self.state.engine.configured = configured
            self.state.ledger.configure(configured)
        self.kv: list[KvRow] = []
        self.keyframes = Keyframes(self.state.engine, every)
        self.count = 0

    def extend(self, events: Iterable[Event]) -> Folded:
        """Fold further events, later than all before; returns itself."""
        state, engine, kv, count = self.state, self.state.engine, self.kv, self.count
        due = self.keyframes.due
        for event in events:
            state.apply(event)
            count += 1
            if engine.kv_changed:
                kv.append(_kv_row(event, engine.ledger))
            if count >= due:
                due = self.keyframes.take(count, engine)
        self.count = count
        return self


def fold(events: Iterable[Event], configured: EngineConfigured | None = None) -> Folded:
    """Fold `events` (in the order of time). `configured`: the engine's sizes, if no event says them."""
    return Folded(configured).extend(events)


def _kv_row(event: Event, ledger: Ledger) -> KvRow:
    return KvRow(
        event.t, event.iteration, event.kind, ledger.free, ledger.evictable, ledger.protected,
        ledger.private_total, ledger.total, ledger.exact,
    )  # fmt: skip
