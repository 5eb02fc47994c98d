"""The transfers of a prefill or decode server as its own events tell them: one a request, and who held up the others.

Mirrors what SGLang's time_stats have of the bootstrap, prealloc, transfer and inflight queues, with the pieces of KV
and the reasons of a wait for room. Imports: events, recording (ledger, standings).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgviz.events.schema import (
    BatchProcessed,
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggPreallocRefused,
    DisaggQueued,
    DisaggTransferred,
    EngineConfigured,
    Event,
    KvReceived,
    KvSent,
    LimitsChanged,
    OutputStreamed,
    PoolReturned,
    PoolTaken,
    RequestAborted,
    TokensSampled,
    TreeInserted,
    TreeLocked,
)
from sgviz.recording.engine_fold import ENDS_AT_ONCE
from sgviz.recording.ledger import Ledger
from sgviz.recording.standings import MOST_HOLDERS, Holders

PREFILL, DECODE = "prefill", "decode"
_MEMORY = (EngineConfigured, LimitsChanged, PoolReturned, PoolTaken, TreeInserted, TreeLocked)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """From `t` on (monotonic ns) the decode side has no room for the first of its prealloc queue.

    `holders`: who had private KV then, with their tokens, largest first.
    """

    t: int
    body: DisaggPreallocRefused
    holders: Holders


@dataclass(slots=True)
class TransferState:
    """One request on this side. Stamps are monotonic ns of the side's host (0: not reached).

    Attributes:
        queued, bootstrapped, preallocated: when it was told. computed: (prefill) the whole prompt's result was in.
        transferred: when the end of the transfer was noticed. ended: aborted here, or (prefill) its end was told.
        room_taken, outcome: the events of the reservation and of the end. sent, received: pieces, in order.
    """

    rid: str
    side: str
    room: int
    peer: str
    prompt_tokens: int
    queued: int
    bootstrapped: int = 0
    prefix_len: int = 0
    preallocated: int = 0
    computed: int = 0
    transferred: int = 0
    ended: int = 0
    room_taken: DisaggPreallocated | None = None
    outcome: DisaggTransferred | None = None
    sent: list[KvSent] = field(default_factory=list)
    received: list[KvReceived] = field(default_factory=list)

    @property
    def pieces(self) -> list[KvSent] | list[KvReceived]:
        """What this side did of the KV."""
        return self.sent if self.side == PREFILL else self.received

    @property
    def bytes(self) -> int:
        return self.outcome.bytes if self.outcome is not None else sum(piece.bytes for piece in self.pieces)

    @property
    def over(self) -> int:
        """When it was over on this side's transfer, well or not (0: it is not)."""
        return self.transferred or self.ended

    @property
    def in_place(self) -> int:
        """When the last piece was in its pages, or (prefill) that was confirmed; 0 if that is not known."""
        if self.outcome is None or not self.outcome.ok:
            return 0
        return max((piece.end_ns for piece in self.received), default=self.outcome.end_ns)

    @property
    def rate(self) -> float:
        """Bytes a second from the first send until all was in place; 0 if that is not known."""
        out = self.outcome
        return out.bytes * 1e9 / (out.end_ns - out.start_ns) if out and out.end_ns > out.start_ns > 0 else 0.0


class Transfers:
    """All of a recording, in the order of the events.

    Attributes:
        by_rid: the transfers of each name, in order. stops: when there was no room, in order of time.
        side: prefill or decode; "" for a recording of neither.
    """

    def __init__(self, configured: EngineConfigured | None = None) -> None:
        self.by_rid: dict[str, list[TransferState]] = {}
        self.stops: list[NoRoom] = []
        self.side = ""
        self._ledger = Ledger()
        if configured is not None:
            self._ledger.configure(configured)
        self._sampled: dict[int, tuple[str, ...]] = {}

    @classmethod
    def together(cls, parts: Sequence[Transfers]) -> Transfers:
        """Those of the ranks of one server."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for part in parts:
            whole.side = whole.side or part.side
            whole.stops += part.stops
            for rid, run in part.by_rid.items():
                whole.by_rid[rid] = sorted([*whole.by_rid.get(rid, ()), *run], key=lambda each: each.queued)
        whole.stops.sort(key=lambda stop: stop.t)
        return whole

    def all(self) -> Iterable[TransferState]:
        """In the order of arrival."""
        return sorted((each for run in self.by_rid.values() for each in run), key=lambda each: each.queued)

    def of(self, rid: str, since: int = 0, until: int = 0) -> TransferState | None:
        """The transfer of a request that lived from `since` to `until` (0: unbounded); None without one."""
        for each in reversed(self.by_rid.get(rid, ())):
            if each.queued >= since and (not until or each.queued <= until):
                return each
        return None

    def read(self, events: Iterable[Event]) -> Transfers:
        """Take in `events` (in the order of time); returns itself."""
        handlers: dict[type, Callable[[Event, Any], None]] = {
            DisaggQueued: self._on_queued, DisaggBootstrapped: self._on_bootstrapped,
            DisaggPreallocRefused: self._on_refused, DisaggPreallocated: self._on_preallocated,
            KvSent: self._on_sent, KvReceived: self._on_received, DisaggTransferred: self._on_transferred,
            OutputStreamed: self._on_streamed,
            TokensSampled: self._on_sampled, BatchProcessed: self._on_processed, RequestAborted: self._on_aborted,
        } | dict.fromkeys(_MEMORY, self._on_memory)  # fmt: skip
        find = handlers.get
        for event in events:
            handler = find(type(event.body))
            if handler is not None:
                handler(event, event.body)
        return self

    def _open(self, rid: str) -> TransferState | None:
        run = self.by_rid.get(rid)
        return run[-1] if run else None

    def _on_memory(self, event: Event, body: Any) -> None:
        if isinstance(body, EngineConfigured):
            self._ledger.configure(body)
        else:
            self._ledger.apply(body)

    def _on_queued(self, event: Event, body: DisaggQueued) -> None:
        self.side = self.side or body.side
        state = TransferState(body.rid, body.side, body.room, body.peer, body.prompt_tokens, event.t)
        self.by_rid.setdefault(body.rid, []).append(state)

    def _on_bootstrapped(self, event: Event, body: DisaggBootstrapped) -> None:
        if (state := self._open(body.rid)) is not None:
            state.bootstrapped, state.prefix_len = event.t, body.decode_prefix_len

    def _on_refused(self, event: Event, body: DisaggPreallocRefused) -> None:
        holders = tuple(self._ledger.holders()[:MOST_HOLDERS])
        self.stops.append(NoRoom(event.t, body, holders))

    def _on_preallocated(self, event: Event, body: DisaggPreallocated) -> None:
        if (state := self._open(body.rid)) is not None:
            state.preallocated, state.room_taken, state.prefix_len = event.t, body, body.prefix_len

    def _on_sent(self, event: Event, body: KvSent) -> None:
        if (state := self._open(body.rid)) is not None:
            state.sent.append(body)

    def _on_received(self, event: Event, body: KvReceived) -> None:
        if (state := self._open(body.rid)) is not None:
            state.received.append(body)

    def _on_transferred(self, event: Event, body: DisaggTransferred) -> None:
        if (state := self._open(body.rid)) is not None:
            state.transferred, state.outcome = event.t, body

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        if self.side == PREFILL:
            self._sampled[body.bid] = body.rids

    def _on_processed(self, event: Event, body: BatchProcessed) -> None:
        for rid in self._sampled.pop(body.bid, ()):
            state = self._open(rid)
            if state is not None and not state.computed:
                state.computed = event.t
        for rid in body.finished:
            self._end(rid, event.t)

    def _on_streamed(self, event: Event, body: OutputStreamed) -> None:
        if self.side == PREFILL:
            for rid, finished in zip(body.rids, body.finished):
                if finished:
                    self._end(rid, event.t)

    def _on_aborted(self, event: Event, body: RequestAborted) -> None:
        if body.where in ENDS_AT_ONCE:
            self._end(body.rid, event.t)

    def _end(self, rid: str, t: int) -> None:
        state = self._open(rid)
        if state is not None and not state.ended:
            state.ended = t
