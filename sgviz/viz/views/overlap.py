"""Host and device over the last stretch of a run: what the scheduler's thread did above, the forwards below.

Spans and sums are those of the overlap account; here they are cut to the stretch, and where there are more than a
screen has pixels, drawn as columns. Imports: events, recording, numpy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from sgviz.events.schema import BatchPlanned, BatchProcessed, Event, QueueEntered, RequestAborted
from sgviz.recording.engine_fold import EngineFold
from sgviz.recording.intervals import Interval, both, normal, without
from sgviz.recording.overlap_account import (
    SCHEDULER,
    STAGES,
    WAIT,
    OverlapAccount,
    Span,
    overlap_account,
)
from sgviz.viz.views.models import LaneSpan, OverlapNumbers, OverlapView

Since = Callable[[int, int], tuple[int, Sequence[Event]]]
PIECE = 256  # events read first, from the newest back; then twice as many each time
BATCHES_BEFORE = 3  # of which at most two can be under way where the stretch begins
MOST_EVENTS = 32_768  # a busier stretch is cut short
MOST_SPANS = 1200  # in a lane; about the pixels of a wide screen
MOST_TURNS = 200
HIDDEN, EXPOSED, IDLE = "hidden", "exposed", "idle"


def overlap_view(since: Since, count: int, engine: EngineFold, seconds: float, t0: int) -> OverlapView:
    """The lanes of the `seconds` before event number `count`, whose state is `engine`."""
    events, cut = _recent(since, count, round(seconds * 1e9))
    if not events:
        return OverlapView(
            begin_ms=0.0, end_ms=0.0, seconds=seconds, host=(), kinds=(), device=(), turns=(),
            numbers=OverlapNumbers(), column_ms=0.0, cut=False, missing=0,
        )  # fmt: skip
    end = events[-1].t
    begin = max(events[0].t, end - round(seconds * 1e9))
    account = overlap_account(events, stretch=(begin, end), open_rids=_open_before(events, engine))
    host, kinds, device, width = _lanes(account, (begin, end))
    return OverlapView(
        begin_ms=(begin - t0) / 1e6, end_ms=(end - t0) / 1e6, seconds=seconds, host=_placed(host, t0),
        kinds=_placed(kinds, t0), device=_placed(device, t0), turns=_turns(events, begin, t0),
        numbers=_numbers(account), column_ms=width / 1e6, cut=cut, missing=account.missing,
    )  # fmt: skip


def _recent(since: Since, count: int, length_ns: int) -> tuple[list[Event], bool]:
    """The scheduler's events of the stretch and of a few batches before, oldest first; whether it was cut short."""
    pieces: list[list[Event]] = []
    at, newest, before, piece = count, 0, 0, PIECE
    while at > 0 and before < BATCHES_BEFORE and count - at < MOST_EVENTS:
        asked, piece = max(0, at - piece), 2 * piece
        first, events = since(asked, at - asked)
        own = [event for event in events if event.component == SCHEDULER]
        pieces.append(own)
        newest = newest or (own[-1].t if own else 0)
        before += sum(event.t < newest - length_ns and isinstance(event.body, BatchPlanned) for event in own)
        at = asked if first == asked else 0  # those before have fallen out of memory
    found = list(chain.from_iterable(reversed(pieces)))
    cut = at > 0 and before < BATCHES_BEFORE and found[:1] != [] and found[0].t > newest - length_ns
    return found[_start(found, newest - length_ns) :], cut


def _start(events: Sequence[Event], begin: int) -> int:
    """Where to begin so that what was under way at `begin` is known: a few batches earlier."""
    left = BATCHES_BEFORE
    for index in range(bisect_left(events, begin, key=lambda event: event.t) - 1, -1, -1):
        left -= isinstance(events[index].body, BatchPlanned)
        if left == 0:
            return index
    return 0


def _open_before(events: Sequence[Event], engine: EngineFold) -> list[str]:
    """Who was in the scheduler before the first of `events`: there at the end, or ended since, and not come since."""
    known = dict.fromkeys([*engine.waiting, *engine.running, *filter(None, [engine.chunked])])
    came: set[str] = set()  # membership only
    for event in events:
        match event.body:
            case QueueEntered(rid=rid, again=False):
                came.add(rid)
            case BatchProcessed(finished=finished):
                known.update(dict.fromkeys(finished))
            case RequestAborted(rid=rid, where=where) if where != "intake":
                known[rid] = None
    return [rid for rid in known if rid not in came]


def _lanes(account: OverlapAccount, stretch: Interval) -> tuple[list[Span], list[Span], list[Span], float]:
    """Host stages, hidden or exposed host time, forwards and idle device; ns a column where it is drawn so (else 0)."""
    shown = [stretch]
    host = [span for span in account.host if span.stage in (*STAGES, WAIT)]
    busy = both(normal((span.start, span.end) for span in account.device), shown)
    work = both(normal((span.start, span.end) for span in host if span.stage != WAIT), shown)
    idle = without(both(account.runnable, shown), busy)
    lanes = (
        _cut(host, stretch),
        _spans(both(work, busy), HIDDEN) + _spans(both(work, idle), EXPOSED),
        _cut(account.device, stretch) + _spans(idle, IDLE),
    )
    if max(map(len, lanes)) <= MOST_SPANS:
        return *lanes, 0.0
    first, second, third = (_columns(lane, stretch) for lane in lanes)
    return first, second, third, (stretch[1] - stretch[0]) / MOST_SPANS


def _cut(spans: Sequence[Span], stretch: Interval) -> list[Span]:
    low, high = stretch
    return [
        Span(max(span.start, low), min(span.end, high), span.stage, span.bid)
        for span in spans
        if span.start < high and span.end > low
    ]


def _spans(parts: Sequence[Interval], name: str) -> list[Span]:
    return [Span(start, end, name) for start, end in parts]


def _columns(spans: Sequence[Span], stretch: Interval) -> list[Span]:
    """The same in columns of equal width, each named by what took most of it; nothing: less than anything."""
    names = list(dict.fromkeys(span.stage for span in spans))
    if not names:
        return []
    edges = np.linspace(stretch[0], stretch[1], MOST_SPANS + 1)
    covered = np.zeros((len(names), MOST_SPANS))
    for row, name in enumerate(names):
        parts = np.array(normal((span.start, span.end) for span in spans if span.stage == name), np.float64)
        so_far = np.cumsum(np.column_stack((np.zeros(len(parts)), parts[:, 1] - parts[:, 0])).ravel())
        covered[row] = np.diff(np.interp(edges, parts.ravel(), so_far))
    best = np.where(covered.max(axis=0) > 0, covered.argmax(axis=0), -1)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(best)) + 1))
    ends = np.concatenate((starts[1:], [MOST_SPANS]))
    return [
        Span(round(edges[start]), round(edges[end]), names[best[start]])
        for start, end in zip(starts.tolist(), ends.tolist())
        if best[start] >= 0
    ]


def _placed(spans: Sequence[Span], t0: int) -> tuple[LaneSpan, ...]:
    return tuple(
        LaneSpan(
            start_ms=round((span.start - t0) / 1e6, 4), length_ms=round((span.end - span.start) / 1e6, 4),
            name=span.stage, bid=span.bid,
        )
        for span in spans
    )  # fmt: skip


def _turns(events: Sequence[Event], begin: int, t0: int) -> tuple[tuple[float, int], ...]:
    """When iterations began; of very many only some."""
    starts: dict[int, int] = {}
    for event in events:
        if event.t >= begin and event.iteration:
            starts.setdefault(event.iteration, event.t)
    every = -(-len(starts) // MOST_TURNS) or 1
    return tuple((round((t - t0) / 1e6, 4), number) for number, t in list(starts.items())[::every])


def _numbers(account: OverlapAccount) -> OverlapNumbers:
    length = account.window_s or 1.0
    return OverlapNumbers(
        hidden_s=account.host_hidden_s, exposed_s=account.host_exposed_s, wait_s=account.host_wait_s,
        busy_s=account.device_busy_s, idle_s=account.device_idle_s, launches=account.launches,
        hidden_share=account.hidden_share, busy_share=account.device_busy_s / length,
        idle_share=account.device_idle_s / length,
    )  # fmt: skip
