"""Why the queue stood still, over time: each stop of a planning scan, and each stay of a request in the queue.

A scan tries the queue in order and stops at one request for one reason; everybody behind waits for that
one. So a list of stops, and the stays in between, tell each request's reasons without looking at the whole
queue at every step. Mirrors the verdicts of SGLang's PrefillAdder, which there are lost at once.

Imports: events, recording.parked.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sgviz.events.schema import (
    AdmitOk,
    AdmitRefused,
    BatchPlanned,
    BatchProcessed,
    ChunkSent,
    EngineConfigured,
    Event,
    GenerationContinued,
    GenerationPaused,
    LoopIdle,
    LoopResumed,
    QueueEntered,
    QueueSorted,
    Reason,
    RequestAborted,
    RequestRetracted,
    ScanStopped,
)
from sgviz.recording.engine_fold import ENDS_AT_ONCE
from sgviz.recording.parked import Park, Pauses

Holders = tuple[tuple[str, int], ...]
MOST_HOLDERS = 8
UNITS = {
    Reason.KV: "KV tokens",
    Reason.ROWS: "rows",
    Reason.RUNNING_SLOTS: "running slots",
    Reason.CHUNK_BUDGET: "tokens of the chunk budget",
    Reason.PREFILL_BUDGET: "tokens of the prefill budget",
    Reason.MAX_REQUESTS: "requests in the batch",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """From `t` on (monotonic ns) planning stops at `head` for `reason`; whoever waits stands behind it.

    `need`/`have` in the unit of the reason, -1 where no event says it. `holders`: who has the scarce thing.
    `admitted`: who was taken in the same plan, in order, and `numbers` the arrivals in the queue they were.
    `number` is that of the head; `latest` the largest of all these. `words` says it in short. `sorted`: a policy
    other than fcfs has moved somebody of this queue. `priorities`: of the head and the admitted, by rid.
    `passed`: the first that was passed over, being of the other kind than the batch ("": nobody), `passed_number` its
    arrival in the queue, and `passed_kind` whether those of its kind, who wait behind it, are for vectors.
    """

    t: int
    head: str
    reason: Reason
    need: int
    have: int
    holders: Holders
    admitted: tuple[str, ...]
    numbers: tuple[int, ...]
    number: int
    words: str
    sorted: bool = False
    priorities: tuple[tuple[str, int | None], ...] = ()
    passed: str = ""
    passed_number: int = 0
    passed_kind: bool = False

    @property
    def latest(self) -> int:
        return max(self.number, *self.numbers, self.passed_number)

    @property
    def batch_holders(self) -> Holders:
        """Who is in the batch that requests of the other kind have to wait for."""
        return tuple((rid, 1) for rid in self.admitted[:MOST_HOLDERS])

    def passes(self, stay: Stay) -> bool:
        """Whether it was passed over with others of its kind."""
        return bool(self.passed) and self.passed_kind == stay.embedding


@dataclass(slots=True)
class Stay:
    """One stay in the queue: `start` to `end` (0: still there); `number` counts all arrivals in the queue.

    A retracted request keeps the number it had. `iteration` and `planned_in`: turns of the loop in which it came
    and was taken (0: not), at `admitted` into batch `bid`. `retracted`: the event that sent it back, at
    `retracted_at`. `survivors`: who ran on then.
    """

    start: int
    number: int
    iteration: int
    end: int = 0
    planned_in: int = 0
    admitted: int = 0
    bid: int = 0
    retracted: RequestRetracted | None = None
    retracted_at: int = 0
    survivors: Holders = ()
    priority: int | None = None
    embedding: bool = False


@dataclass(slots=True)
class Standings:
    """The stops in order of time, and what else the explanation of a request needs by rid.

    Attributes:
        ends: when the queue became empty, as long as it did (sorted).
        stays: by rid, in order. refused_chunks: refusals of a prompt under way, `(t, event)`, by rid.
        aborts: by rid, `(t, event)`. sends: when chunks were handed to the HTTP layer, by rid.
        idles: when the loop told that it was idle. parks: when a debugger held it.
        gates, pauses: when new requests had to wait before they were sent, and when no batch was planned.
        heads: which stops (by number) were at a request or passed it over first, by rid. sorted_stops: how many of
            the first n were of a queue that a policy had sorted.
    """

    stops: list[Stop] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    stays: dict[str, list[Stay]] = field(default_factory=dict)
    refused_chunks: dict[str, list[tuple[int, AdmitRefused]]] = field(default_factory=dict)
    aborts: dict[str, list[tuple[int, RequestAborted]]] = field(default_factory=dict)
    sends: dict[str, list[int]] = field(default_factory=dict)
    idles: list[int] = field(default_factory=list)
    parks: list[Park] = field(default_factory=list)
    gates: Pauses = field(default_factory=Pauses)
    pauses: Pauses = field(default_factory=Pauses)
    heads: dict[str, list[int]] = field(default_factory=dict)
    sorted_stops: list[int] = field(default_factory=lambda: [0])
    _waiting: dict[str, Stay] = field(default_factory=dict)
    _running: dict[str, None] = field(default_factory=dict)
    _admitted: list[AdmitOk] = field(default_factory=list)
    _chunked: str = ""
    _refused: AdmitRefused | None = None
    _retracted: dict[str, tuple[int, RequestRetracted]] = field(default_factory=dict)
    _preempted: list[str] = field(default_factory=list)
    _most_running: int = -1
    _count: int = 0
    _sorted: bool = False

    @property
    def held(self) -> tuple[list[Park], list[Park], list[Park]]:
        """When the door was closed, planning paused, the scheduler parked."""
        return self.gates.parks, self.pauses.parks, self.parks

    def stops_of(self, stay: Stay, until: int) -> tuple[int, int]:
        """The stops that hold during a stay: from the one in force when it began, up to one of `until` or later.

        One from after its own admission says nothing of it.
        """
        first = bisect_right(self.stops, stay.start, key=_time)
        if first:
            emptied = bisect_right(self.ends, stay.start)
            if not emptied or self.ends[emptied - 1] < self.stops[first - 1].t:
                first -= 1
        if stay.end and stay.admitted and stay.admitted <= until:
            return first, bisect_left(self.stops, stay.admitted, key=_time)
        return first, bisect_right(self.stops, until, key=_time)

    def _number(self, rid: str) -> int:
        """Which arrival in the queue the request was, lately (0: none)."""
        stays = self.stays.get(rid)
        return stays[-1].number if stays else 0

    def _priority(self, rid: str) -> int | None:
        stays = self.stays.get(rid)
        return stays[-1].priority if stays else None

    # ------------------------------------------------------------ building

    def _on_configured(self, event: Event, body: EngineConfigured) -> None:
        self._most_running = body.max_running_requests

    def _on_entered(self, event: Event, body: QueueEntered) -> None:
        self._count += 1
        stay = Stay(event.t, self._count, event.iteration, priority=body.priority, embedding=body.embedding)
        if body.again and body.rid in self._retracted:
            stay.retracted_at, stay.retracted = self._retracted.pop(body.rid)
            stay.number = self._number(body.rid) or stay.number
            stay.survivors = tuple((rid, 1) for rid in self._running)[:MOST_HOLDERS]
        self.stays.setdefault(body.rid, []).append(stay)
        self._waiting[body.rid] = stay

    def _on_sorted(self, event: Event, body: QueueSorted) -> None:
        self._sorted = body.policy != "fcfs"

    def _on_admitted(self, event: Event, body: AdmitOk) -> None:
        if (stay := self._waiting.get(body.rid)) is not None:
            stay.admitted = event.t
        self._admitted.append(body)
        if body.chunked:
            self._chunked = body.rid
        elif self._chunked == body.rid:
            self._chunked = ""

    def _on_refused(self, event: Event, body: AdmitRefused) -> None:
        self._refused = body
        if body.rid == self._chunked:
            self.refused_chunks.setdefault(body.rid, []).append((event.t, body))

    def _on_stopped(self, event: Event, body: ScanStopped) -> None:
        refused, taken = self._refused, self._admitted
        if refused is not None and refused.rid == body.rid and refused.reason is body.reason:
            need, have, holders = refused.need, refused.have, refused.holders
        else:
            need, have, holders = self._budget(body.reason)
        if not holders:
            holders = self._budget(body.reason)[2]
        admitted = tuple([ok.rid for ok in taken])
        numbers = tuple([self._number(rid) for rid in admitted])
        words = budget_words(body.reason, need, have, holders)
        priorities = tuple([(rid, self._priority(rid)) for rid in (body.rid, *admitted)])
        passed = body.rid if body.reason is Reason.OTHER_KIND else body.passed
        for rid in dict.fromkeys((body.rid, passed or body.rid)):
            self.heads.setdefault(rid, []).append(len(self.stops))
        last = self.stays[passed][-1] if passed in self.stays else None
        self.sorted_stops.append(self.sorted_stops[-1] + self._sorted)
        self.stops.append(
            Stop(
                event.t, body.rid, body.reason, need, have, holders, admitted, numbers, self._number(body.rid),
                words, self._sorted, priorities, passed, self._number(passed), last is not None and last.embedding,
            )
        )  # fmt: skip
        self._refused = None

    def _budget(self, reason: Reason) -> tuple[int, int, Holders]:
        """What the plan so far says of a budget that is used up without a verdict of its own."""
        taken = tuple((ok.rid, ok.extend) for ok in self._admitted)[:MOST_HOLDERS]
        last = self._admitted[-1] if self._admitted else None
        if reason is Reason.PRIORITY:
            return -1, -1, tuple((rid, 1) for rid in self._preempted)[:MOST_HOLDERS]
        if reason in (Reason.RUNNING_SLOTS, Reason.ROWS):
            running = dict(self._running) | {ok.rid: None for ok in self._admitted}
            holders = tuple((rid, 1) for rid in running)[:MOST_HOLDERS]
            return len(running) + 1, self._most_running, holders
        if last is None:
            return -1, -1, ()
        have = {Reason.KV: last.rem_total, Reason.CHUNK_BUDGET: last.rem_chunk}.get(reason, last.rem_input)
        return 1, max(0, have), taken

    def _on_planned(self, event: Event, body: BatchPlanned) -> None:
        self._admitted, self._preempted, self._refused = [], [], None
        if body.mode == "decode":
            return
        for rid in body.rids:
            stay = self._waiting.pop(rid, None)
            if stay is not None:
                stay.end, stay.planned_in, stay.bid = event.t, event.iteration, body.bid
            self._running[rid] = None
        self._note_empty(event.t)

    def _on_processed(self, event: Event, body: BatchProcessed) -> None:
        for rid in body.finished:
            self._running.pop(rid, None)

    def _on_retracted(self, event: Event, body: RequestRetracted) -> None:
        self._running.pop(body.rid, None)
        self._retracted[body.rid] = (event.t, body)
        if body.preempted_by:
            self._preempted.append(body.rid)
        if self._chunked == body.rid:
            self._chunked = ""

    def _on_aborted(self, event: Event, body: RequestAborted) -> None:
        self.aborts.setdefault(body.rid, []).append((event.t, body))
        if body.where in ENDS_AT_ONCE:
            stay = self._waiting.pop(body.rid, None)
            if stay is not None:
                stay.end = event.t
                self._note_empty(event.t)
            self._running.pop(body.rid, None)

    def _note_empty(self, t: int) -> None:
        if not self._waiting:
            self.ends.append(t)
            self._sorted = False

    def _on_chunk(self, event: Event, body: ChunkSent) -> None:
        self.sends.setdefault(body.rid, []).append(event.t)

    def _on_idle(self, event: Event, body: LoopIdle) -> None:
        self.idles.append(event.t)

    def _on_resumed(self, event: Event, body: LoopResumed) -> None:
        self.parks.append(Park(body.since_ns, event.t, f"held at {body.at}: {body.why}"))

    def _on_paused(self, event: Event, body: GenerationPaused) -> None:
        self._pauses_of(event).begin(event, body)

    def _on_continued(self, event: Event, body: GenerationContinued) -> None:
        self._pauses_of(event).end(event, body)

    def _pauses_of(self, event: Event) -> Pauses:
        return self.pauses if event.component == "scheduler" else self.gates

    def read(self, events: Iterable[Event]) -> Standings:
        """Take in `events` (in the order of time); returns itself."""
        handlers: dict[type, Callable[[Event, Any], None]] = {
            EngineConfigured: self._on_configured,
            QueueEntered: self._on_entered,
            QueueSorted: self._on_sorted,
            AdmitOk: self._on_admitted,
            AdmitRefused: self._on_refused,
            ScanStopped: self._on_stopped,
            BatchPlanned: self._on_planned,
            BatchProcessed: self._on_processed,
            RequestRetracted: self._on_retracted,
            RequestAborted: self._on_aborted,
            ChunkSent: self._on_chunk,
            LoopIdle: self._on_idle,
            LoopResumed: self._on_resumed,
            GenerationPaused: self._on_paused,
            GenerationContinued: self._on_continued,
        }
        find = handlers.get
        for event in events:
            handler = find(type(event.body))
            if handler is not None:
                handler(event, event.body)
        return self


def budget_words(reason: Reason, need: int, have: int, holders: Holders) -> str:
    """What was short: `needs 120 KV tokens, 80 to be had; held by r1 (64), r2 (32)`."""
    unit = UNITS.get(reason, "")
    if reason is Reason.PRIORITY:
        return f"the room left is for who was sent back: {', '.join(rid for rid, _ in holders)}"
    if reason is Reason.OTHER_KIND:
        return f"the batch holds requests of the other kind: {', '.join(rid for rid, _ in holders)}"
    held = ", ".join(f"{rid} ({amount:,})" for rid, amount in holders)
    numbers = f"needs {need:,} {unit}, {have:,} to be had"
    if need < 0 or (need == 1 and have <= 0):
        numbers = f"no {unit} left"
    if reason is Reason.RUNNING_SLOTS:
        numbers = f"{need} would run, {have} may" if have >= 0 else "all running slots taken"
    return numbers + (f"; held by {held}" if held else "")


def _time(stop: Stop) -> int:
    return stop.t
