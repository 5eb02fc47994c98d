"""The overlap account: host time hidden behind the device, host time exposed, device idle. A fold of events.

For a stretch of a run it answers what an overlapping loop buys. Four sets of moments are read from the
scheduler's events, everything else is their arithmetic:

- device busy: forwards and samplings, `[start_ns, forward_end_ns]` and `[sample_start_ns, end_ns]` of every
  `batch.finished` (in one where the device does not tell them apart). Sampling counts: no forward of the next batch
  can begin before it. Two things do not: the wait between a forward and a sampling that was delayed, in which the
  device stands still for the host, and the copy of the results, which keeps nobody from the next forward;
- host busy: the scheduler's thread, except while it waits for a launch's result (`wait_ns` until
  `batch.finished` itself) and while it waits for a message (`loop.idle` until the next turn begins);
- runnable: some request has been taken from the inbox and its last result is not yet processed;
- the window: what is counted, see `overlap_account`; without the time in which a debugger held the scheduler.

*hidden* = host busy and device busy; *exposed* = host busy, device not, something runnable; *device idle* =
something runnable and the device not busy; *hand-off* = that part of device idle in which the host waits (for a result
that is there already, or for a launch that has not begun). So device idle = exposed + hand-off, always.

SGLang has no such account; its nearest is reading gaps off a profiler's trace by eye. Simplified: the events
say nothing about how long tokenizer manager, HTTP layer and detokenizer compute, so the host is the scheduler;
a turn that only answered a message while idle counts as waiting.

Imports: events, errors, recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sgviz.errors import BadRequest
from sgviz.events.schema import (
    BatchFinished,
    BatchLaunched,
    BatchPlanned,
    BatchProcessed,
    DisaggQueued,
    Event,
    GenerationContinued,
    GrammarQueued,
    LoopIdle,
    LoopResumed,
    OutputStreamed,
    QueueEntered,
    RequestAborted,
    TokensSampled,
)
from sgviz.recording.engine_fold import ENDS_AT_ONCE
from sgviz.recording.intervals import Interval, Intervals, both, normal, total, without

NS = 1e9
SCHEDULER, DEVICE = "scheduler", "device"
STAGES = ("receive", "plan", "launch", "process", "stream", "loop")
WAIT, IDLE = "wait", "idle"  # stages of the thread that are no work
SAMPLE, COPY = "sample", "copy"  # stages of the device beside the modes of its forwards
TURN, TAKEN = "turn", "taken"  # marks that end no stage of their own: a turn begins, a message is in hand
Until = Literal["auto", "last_arrival", "last_launch"]
STEADY_SHARE = 0.1  # of the launches must lie before the last arrival for it to end the window
_ENDS_AT_ONCE = ENDS_AT_ONCE | {"intake"}


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did from `start` to `end` (monotonic ns).

    `stage`: of STAGES, `wait`, `idle`; of the device a batch's mode, `sample` or `copy`.
    """

    start: int
    end: int
    stage: str
    bid: int = 0


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage of one component inside the window.

    For the device the stages are the batch modes (the forward) and `sample`: their seconds are `busy_s`, nothing is
    hidden or exposed.
    """

    component: str
    stage: str
    busy_s: float
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class OverlapAccount:
    """The account of one run; seconds inside the window unless said otherwise.

    Attributes:
        window: `(start, end)` in monotonic ns. until: what ended it, `last arrival`, `last launch`, a given stretch.
        host_busy_s: hidden, exposed, and the rest, during which nothing was runnable.
        host_wait_s: the scheduler waited for a result. handoff_s: of that and of idling, with the device
            standing still although something was runnable.
        device_idle_s: something runnable, the device not busy. runnable_s: something was runnable.
        launches: forwards that began in the window. stages: the same seconds by component and stage.
        parked_s: a debugger or a pause held the scheduler; in none of the others.
        host, device, copies, runnable: the spans of the whole run, for lanes.
        missing: scheduler events lost in between; the account is then only as good as what is left.
    """

    window: Interval
    until: str
    host_busy_s: float
    host_hidden_s: float
    host_exposed_s: float
    host_wait_s: float
    handoff_s: float
    device_busy_s: float
    device_idle_s: float
    runnable_s: float
    launches: int
    stages: tuple[StageTime, ...] = ()
    host: tuple[Span, ...] = field(default=(), repr=False)
    device: tuple[Span, ...] = field(default=(), repr=False)
    copies: tuple[Span, ...] = field(default=(), repr=False)
    runnable: tuple[Interval, ...] = field(default=(), repr=False)
    missing: int = 0
    parked_s: float = 0.0

    @property
    def window_s(self) -> float:
        return (self.window[1] - self.window[0]) / NS

    @property
    def hidden_share(self) -> float:
        """Hidden part of the host time that counts (hidden and exposed); 0 where there is none."""
        return _share(self.host_hidden_s, self.host_hidden_s + self.host_exposed_s)

    @property
    def device_idle_share(self) -> float:
        """Part of the device's time in which it stood still although something was runnable."""
        return _share(self.device_idle_s, self.device_idle_s + self.device_busy_s)

    def row(self) -> dict[str, float | int | str]:
        """The numbers under their names, for a table."""
        return {
            "host_hidden_s": self.host_hidden_s,
            "host_exposed_s": self.host_exposed_s,
            "device_idle_s": self.device_idle_s,
            "device_busy_s": self.device_busy_s,
            "hidden_share": self.hidden_share,
            "device_idle_share": self.device_idle_share,
            "handoff_s": self.handoff_s,
            "host_busy_s": self.host_busy_s,
            "host_wait_s": self.host_wait_s,
            "runnable_s": self.runnable_s,
            "window_s": self.window_s,
            "launches": self.launches,
            "until": self.until,
            "missing_events": self.missing,
        }


def overlap_account(
    events: Iterable[Event],
    until: Until = "auto",
    *,
    stretch: Interval | None = None,
    open_rids: Iterable[str] = (),
) -> OverlapAccount:
    """The account of `events` (in the order of time; only the scheduler's are looked at).

    The window begins with the turn of the first launch. It ends with the last arrival (the last request taken
    from the inbox), so that the emptying of the system at the end does not count. Where everything arrives at
    once there is next to nothing before the last arrival; `until="auto"` then (fewer than a tenth of the
    launches lie before it) ends the window with the last launch instead. `until` forces either.

    Args:
        stretch: count within this instead (monotonic ns), of a run that may still go on: a forward that was
            launched and has no result yet is taken to run from its launch, or the forward before it, to the end.
        open_rids: requests that the scheduler had when `events` begin.

    Raises:
        BadRequest: `until` is none of auto, last_arrival, last_launch.
    """
    if until not in ("auto", "last_arrival", "last_launch"):
        raise BadRequest(f"until is {until!r}; allowed are auto, last_arrival, last_launch")
    seen = _Reader(before=tuple(open_rids))
    for event in events:
        if event.component == SCHEDULER:
            seen.take(event)
    if stretch is None:
        return _account(seen, *_window(seen, until))
    seen.assume_under_way(stretch[1])
    return _account(seen, stretch, "given stretch")


@dataclass(slots=True)
class _Reader:
    """The scheduler's events as stamps: at each moment of `marks` the stage that ends there is known."""

    marks: list[tuple[int, int, str, int]] = field(
        default_factory=list
    )  # t, order, stage that ends here, bid
    device: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    parked: list[Interval] = field(default_factory=list)
    before: tuple[str, ...] = ()  # rids that are open from the first event on
    launches: list[tuple[int, int]] = field(default_factory=list)  # turn, launched
    unfinished: dict[int, int] = field(default_factory=dict)  # when each bid without a result was launched
    arrivals: list[int] = field(default_factory=list)
    modes: dict[int, str] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    compiling: dict[str, None] = field(
        default_factory=dict
    )  # rids that waited for a grammar or their other side
    handed: dict[str, None] = field(default_factory=dict)  # rids whose prompt only is computed here
    runnable: list[Interval] = field(default_factory=list)
    missing: int = 0
    last_t: int = 0
    _seq: int = 0

    def take(self, event: Event) -> None:
        if not self._seq:
            self.open.update(dict.fromkeys(self.before, event.t))
        self.missing += max(0, event.seq - self._seq - 1) if self._seq else 0
        self._seq = max(self._seq, event.seq)
        self.last_t = max(self.last_t, event.t)
        body = event.body
        if isinstance(body, BatchPlanned):
            self.modes[body.bid] = body.mode
            self._mark(event.t, "plan", body.bid)
        elif isinstance(body, BatchLaunched):
            self._launched(event.t, body)
        elif isinstance(body, BatchFinished):
            self._finished(event.t, body)
        elif isinstance(body, BatchProcessed):
            self._mark(event.t, "process", body.bid)
            self._end(body.finished, event.t)
        elif isinstance(body, OutputStreamed):
            self._mark(event.t, "stream")
        elif isinstance(body, DisaggQueued):  # its KV, or where that goes, is not known yet
            self.compiling[body.rid] = None
            if body.side == "prefill":
                self.handed[body.rid] = None
        elif isinstance(body, TokensSampled) and self.handed:
            self._end([rid for rid in body.rids if self.handed.pop(rid, self) is None], event.t)
        elif isinstance(body, GrammarQueued):
            self.compiling[body.rid] = None
        elif isinstance(body, QueueEntered):
            self._entered(event.t, body)
        elif isinstance(body, RequestAborted) and body.where in _ENDS_AT_ONCE:
            self._end((body.rid,), event.t)
        elif isinstance(body, LoopIdle):
            self._mark(event.t, "loop")
            self._mark(event.t, IDLE)
        elif isinstance(body, LoopResumed | GenerationContinued) and event.component == "scheduler":
            self.parked.append((body.since_ns, event.t))

    def _mark(self, t: int, stage: str, bid: int = 0) -> None:
        self.marks.append((t, len(self.marks), stage, bid))

    def _launched(self, t: int, body: BatchLaunched) -> None:
        turn = body.turn_ns or t
        self.launches.append((turn, t))
        self.unfinished[body.bid] = t
        self._mark(turn, TURN)
        self._mark(t, "launch", body.bid)

    def _finished(self, t: int, body: BatchFinished) -> None:
        self.unfinished.pop(body.bid, None)
        mode, bid = self.modes.get(body.bid, "forward"), body.bid
        self.device.append(Span(body.start_ns, body.forward_end_ns or body.end_ns, mode, bid))
        if body.sample_start_ns:
            self.device.append(Span(body.sample_start_ns, body.end_ns, SAMPLE, bid))
        if body.copy_start_ns:
            self.copies.append(Span(body.copy_start_ns, body.copy_end_ns, COPY, bid))
        if body.wait_ns:
            self._mark(body.wait_ns, "loop")
        self._mark(t, WAIT, body.bid)

    def _entered(self, t: int, body: QueueEntered) -> None:
        taken = body.received_ns or t
        if body.rid in self.compiling:  # until now it could not have run
            taken = t
            del self.compiling[body.rid]
        if not body.again:
            self.arrivals.append(taken)
            self._mark(taken, TAKEN)
            self._mark(t, "receive")
        self.open.setdefault(body.rid, taken)

    def _end(self, rids: Sequence[str], t: int) -> None:
        for rid in rids:
            if (since := self.open.pop(rid, None)) is not None:
                self.runnable.append((since, t))

    def assume_under_way(self, until: int) -> None:
        """What was launched and has no result: forwards run one after the other, these as long as is looked at."""
        free = self.device[-1].end if self.device else 0
        start = max(min(self.unfinished.values(), default=until), free)
        if start < until:
            bid = next(iter(self.unfinished))
            self.device.append(Span(start, until, self.modes.get(bid, "forward"), bid))

    def all_runnable(self) -> Intervals:
        """With requests that never ended counted until the last event."""
        return normal([*self.runnable, *((since, self.last_t) for since in self.open.values())])

    def host(self) -> list[Span]:
        """The thread's time end to end. After `idle` it waits until a turn begins that had something to do."""
        spans: list[Span] = []
        last, before = 0, ""
        for t, _, stage, bid in sorted(self.marks):
            if last and t > last:
                spans.append(Span(last, t, _ending(stage, before), bid))
            last, before = max(last, t), stage
        return spans


def _apart(span: Span, parked: Intervals) -> Sequence[Span]:
    """What is left of the span outside of `parked`."""
    if not parked:
        return (span,)
    rest = without([(span.start, span.end)], parked)
    return [Span(start, end, span.stage, span.bid) for start, end in rest]


def _ending(stage: str, before: str) -> str:
    """The stage of the span between two marks, the later of which is `stage`."""
    if before == IDLE:
        return IDLE
    if stage == TAKEN:
        return "receive" if before in (TURN, TAKEN, "receive") else "loop"
    return "loop" if stage == TURN else stage


def _account(seen: _Reader, window: Interval, ended_by: str) -> OverlapAccount:
    parked = normal(seen.parked)
    host = [span for span in seen.host() for span in _apart(span, parked)]
    shown = without([window], parked) if window[1] > window[0] else []
    work = both(normal((span.start, span.end) for span in host if span.stage in STAGES), shown)
    device = both(normal((span.start, span.end) for span in seen.device), shown)
    to_do = without(seen.all_runnable(), parked)
    runnable = both(to_do, shown)
    waits = both(normal((span.start, span.end) for span in host if span.stage == WAIT), shown)
    idle = without(runnable, device)
    return OverlapAccount(
        window=window,
        until=ended_by,
        host_busy_s=total(work) / NS,
        host_hidden_s=total(both(work, device)) / NS,
        host_exposed_s=total(both(work, idle)) / NS,
        host_wait_s=total(waits) / NS,
        handoff_s=total(without(idle, work)) / NS,
        device_busy_s=total(device) / NS,
        device_idle_s=total(idle) / NS,
        runnable_s=total(runnable) / NS,
        launches=sum(window[0] <= launched < window[1] for _, launched in seen.launches),
        stages=_stages(host, seen.device, shown, device, idle),
        host=tuple(host),
        device=tuple(seen.device),
        copies=tuple(seen.copies),
        runnable=tuple(to_do),
        missing=seen.missing,
        parked_s=total(both(parked, [window])) / NS,
    )


def _window(seen: _Reader, until: Until) -> tuple[Interval, str]:
    if not seen.launches:
        return (seen.last_t, seen.last_t), "nothing launched"
    begin = min(turn for turn, _ in seen.launches)
    last_launch = max(launched for _, launched in seen.launches)
    last_arrival = max(seen.arrivals, default=begin)
    before = sum(launched < last_arrival for _, launched in seen.launches)
    steady = before >= max(1, STEADY_SHARE * len(seen.launches))
    if until == "last_arrival" or (until == "auto" and steady):
        return (begin, max(begin, last_arrival)), "last arrival"
    return (begin, last_launch), "last launch"


def _stages(
    host: Sequence[Span], forwards: Sequence[Span], shown: Intervals, device: Intervals, idle: Intervals
) -> tuple[StageTime, ...]:
    rows = []
    for stage in STAGES:
        part = both(normal((span.start, span.end) for span in host if span.stage == stage), shown)
        if part:
            hidden, exposed = total(both(part, device)) / NS, total(both(part, idle)) / NS
            rows.append(StageTime(SCHEDULER, stage, total(part) / NS, hidden, exposed))
    for mode in dict.fromkeys(span.stage for span in forwards):
        part = both(normal((span.start, span.end) for span in forwards if span.stage == mode), shown)
        if part:
            rows.append(StageTime(DEVICE, mode, total(part) / NS, 0.0, 0.0))
    return tuple(rows)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
