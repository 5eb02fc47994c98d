"""The scheduler and its memory after an event: who waits, who runs, what is under way, who holds what.

The part of the fold that is small at any moment, whatever the length of the run, so that it can be copied
(`copy`) and gone on from. Mirrors the fields of SGLang's Scheduler that its log lines and `/server_info`
give a glimpse of. Simplified: what the worker and the detokenizer hold is not folded.

Imports: events, recording.ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sgviz.events.schema import (
    AdmitOk,
    BatchPlanned,
    BatchProcessed,
    Body,
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    DpRankChanged,
    EngineConfigured,
    Event,
    LimitsChanged,
    LoopIdle,
    PoolReturned,
    PoolTaken,
    QueueEntered,
    QueueSorted,
    RequestAborted,
    RequestRetracted,
    RowReturned,
    RowTaken,
    TokensSampled,
    TraceDropped,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)
from sgviz.recording.ledger import Ledger

ENDS_AT_ONCE = frozenset({
    "waiting", "chunk", "retract", "bootstrap", "inflight", "prealloc", "transfer", "ready", "retracted",
})  # fmt: skip


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


@dataclass(slots=True)
class EngineFold:
    """The scheduler's state as its events tell it. `apply` is the only way forward.

    Attributes:
        waiting: rids in the order of the queue. running: rids past it, whose prompt is not being cut.
        chunked: the rid whose prompt is being cut, if one is. rows: row by rid.
        in_flight: batches planned and not processed, by bid.
        aborting: running rids that end with their next result.
        apart: on a prefill or decode server the queue beside the waiting one that a rid is in: bootstrap, prealloc,
            transfer, inflight.
        iteration, t: of the last event. ratio: new_token_ratio as last stated.
        missing: events lost in between, by component. dropped: sum of the `trace.dropped` events.
    """

    ledger: Ledger = field(default_factory=Ledger)
    waiting: list[str] = field(default_factory=list)
    running: dict[str, None] = field(default_factory=dict)
    chunked: str = ""
    rows: dict[str, int] = field(default_factory=dict)
    in_flight: dict[int, BatchPlanned] = field(default_factory=dict)
    aborting: dict[str, None] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    iteration: int = 0
    t: int = 0
    ratio: float = 0.0
    idle: bool = False
    configured: EngineConfigured | None = None
    missing: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    differences: list[Difference] = field(default_factory=list)
    kv_changed: bool = False
    _last_seq: dict[str, int] = field(default_factory=dict)
    _gaps: set[str] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Move to the state after `event`."""
        self.kv_changed = False
        self.t = event.t
        component = event.component
        lost = event.seq - self._last_seq.get(component, 0) - 1
        if lost >= 0:
            self._last_seq[component] = event.seq
            if lost:
                self.missing[component] = self.missing.get(component, 0) + lost
                self._gaps.add(component)
        if event.iteration:
            self.iteration = event.iteration
        handler = _HANDLERS.get(type(event.body))
        if handler is not None:
            handler(self, event, event.body)

    def copy(self) -> EngineFold:
        """The same state, which goes its own way from here."""
        return EngineFold(
            self.ledger.copy(), list(self.waiting), dict(self.running), self.chunked, dict(self.rows),
            dict(self.in_flight), dict(self.aborting), dict(self.apart), self.iteration, self.t, self.ratio, self.idle,
            self.configured, dict(self.missing), self.dropped, list(self.differences), self.kv_changed,
            dict(self._last_seq), set(self._gaps),
        )  # fmt: skip

    # ------------------------------------------------------------ queue and running

    def _on_entered(self, event: Event, body: QueueEntered) -> None:
        self.idle = False
        self.waiting.append(body.rid)

    def _on_sorted(self, event: Event, body: QueueSorted) -> None:
        queue = self.waiting
        for rid, _, rank in body.moves:
            if rank < len(queue):
                queue[rank] = rid

    def _on_admitted(self, event: Event, body: AdmitOk) -> None:
        if body.chunked:
            self.chunked = body.rid
        elif self.chunked == body.rid:
            self.chunked = ""

    def _on_planned(self, event: Event, body: BatchPlanned) -> None:
        self.idle = False
        self.in_flight[body.bid] = body
        self.ratio = body.new_token_ratio
        if body.mode != "decode":
            joined = set(body.rids)  # membership only
            self.waiting = [rid for rid in self.waiting if rid not in joined]
            for rid in body.rids:
                if rid != self.chunked:
                    self.running[rid] = None
        self._on_stated(event, body)

    def _on_processed(self, event: Event, body: BatchProcessed) -> None:
        self.in_flight.pop(body.bid, None)
        for rid in body.finished:
            self._end(rid)

    def _on_retracted(self, event: Event, body: RequestRetracted) -> None:
        self.running.pop(body.rid, None)
        if self.chunked == body.rid:
            self.chunked = ""

    def _on_aborted(self, event: Event, body: RequestAborted) -> None:
        rid = body.rid
        if body.where in ENDS_AT_ONCE:
            self.waiting = [other for other in self.waiting if other != rid]
            self._end(rid)
        elif body.where == "running" and rid in self.aborting:
            self._end(rid)  # memory ran out before the result that was to end it
        elif body.where == "running":
            self.aborting[rid] = None

    def _end(self, rid: str) -> None:
        self.running.pop(rid, None)
        self.aborting.pop(rid, None)
        self.apart.pop(rid, None)
        if self.chunked == rid:
            self.chunked = ""

    # ------------------------------------------------------------ the queues of a prefill or decode server

    def _on_disagg_queued(self, event: Event, body: DisaggQueued) -> None:
        self.idle = False
        self.apart[body.rid] = "bootstrap"

    def _on_bootstrapped(self, event: Event, body: DisaggBootstrapped) -> None:
        if body.side == "decode":
            self.apart[body.rid] = "prealloc"
        else:  # until its prompt is computed it is a request like any
            self.apart[body.rid] = ""

    def _on_preallocated(self, event: Event, body: DisaggPreallocated) -> None:
        self.apart[body.rid] = "transfer"

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        for rid in body.rids if self.apart else ():
            if self.apart.get(rid) == "":
                self.apart[rid] = "inflight"
                self.running.pop(rid, None)

    def _on_transferred(self, event: Event, body: DisaggTransferred) -> None:
        if body.ok:
            self.apart.pop(body.rid, None)

    def _on_idle(self, event: Event, body: LoopIdle) -> None:
        self.idle = True
        self._on_stated(event, body)

    def _on_limits(self, event: Event, body: LimitsChanged) -> None:
        """A debugger made the pool smaller: what left it was free."""
        self._on_memory(event, body)
        if self.ledger.exact and not self._same(event, "free", self.ledger.free, body.free):
            self.ledger.exact = False

    def _on_rank(self, event: Event, body: DpRankChanged) -> None:
        """The scheduler was lost, with all it held; one that comes in its place begins with nothing."""
        self.waiting, self.running, self.in_flight, self.aborting, self.apart = [], {}, {}, {}, {}
        self.chunked, self.rows, self.idle = "", {}, True
        if self.configured is not None:
            self._on_configured(event, self.configured)

    # ------------------------------------------------------------ memory

    def _on_configured(self, event: Event, body: EngineConfigured) -> None:
        self.configured = body
        self.ledger.configure(body)
        self.kv_changed = True

    def _on_dropped(self, event: Event, body: TraceDropped) -> None:
        self.dropped += body.count

    def _on_row(self, event: Event, body: RowTaken | RowReturned) -> None:
        if isinstance(body, RowTaken):
            self.rows[body.rid] = body.row
        else:
            self.rows.pop(body.rid, None)

    def _on_memory(self, event: Event, body: Body) -> None:
        if self._gaps:
            self._note_gap(event.component)
        self.kv_changed = self.ledger.apply(body)

    def _on_pool(self, event: Event, body: PoolTaken | PoolReturned) -> None:
        self._on_memory(event, body)
        if self.ledger.exact and not self._same(event, "free", self.ledger.free, body.free):
            self.ledger.exact = False

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

    def _note_gap(self, component: str) -> None:
        if component in self._gaps:
            self._gaps.discard(component)
            self.ledger.exact = False

    def _same(self, event: Event, name: str, folded: int, stated: int) -> bool:
        if folded == stated:
            return True
        bid = event.body.bid if isinstance(event.body, BatchPlanned) else 0
        self.differences.append(Difference(event.t, event.seq, event.kind, bid, name, folded, stated))
        return False


_HANDLERS: Mapping[type, Callable[[EngineFold, Event, Any], None]] = MappingProxyType(
    {
        QueueEntered: EngineFold._on_entered,
        QueueSorted: EngineFold._on_sorted,
        AdmitOk: EngineFold._on_admitted,
        BatchPlanned: EngineFold._on_planned,
        BatchProcessed: EngineFold._on_processed,
        RequestRetracted: EngineFold._on_retracted,
        RequestAborted: EngineFold._on_aborted,
        DisaggQueued: EngineFold._on_disagg_queued,
        DisaggBootstrapped: EngineFold._on_bootstrapped,
        DisaggPreallocated: EngineFold._on_preallocated,
        DisaggTransferred: EngineFold._on_transferred,
        TokensSampled: EngineFold._on_sampled,
        LoopIdle: EngineFold._on_idle,
        DpRankChanged: EngineFold._on_rank,
        EngineConfigured: EngineFold._on_configured,
        LimitsChanged: EngineFold._on_limits,
        TraceDropped: EngineFold._on_dropped,
        RowTaken: EngineFold._on_row,
        RowReturned: EngineFold._on_row,
        PoolTaken: EngineFold._on_pool,
        PoolReturned: EngineFold._on_pool,
        TreeInserted: EngineFold._on_memory,
        TreeSplit: EngineFold._on_memory,
        TreeEvicted: EngineFold._on_memory,
        TreeLocked: EngineFold._on_memory,
    }
)
