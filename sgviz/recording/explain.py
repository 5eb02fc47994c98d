"""Explaining a request: its stamps, its stays in the queue and the work of the device, put end to end.

Before and after the scheduler the stamps of the request bound the intervals; in the queue the stops of the
planning scans do; while it runs, the timeline of device and scheduler. What none of them covers is
`unexplained`. Mirrors nothing of SGLang, whose time_stats have no causes.

Imports: events, recording, numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sgviz.events.schema import AdmitRefused, Event, RequestAborted
from sgviz.recording.batch_words import batch_words, of_prompt, others_words
from sgviz.recording.controller_part import through_controller
from sgviz.recording.explanation import Cause, Explanation, Part, counted
from sgviz.recording.fold import BatchState, State
from sgviz.recording.parked import HeldTimes
from sgviz.recording.queue_sums import add, stay_sums
from sgviz.recording.queue_words import joined, queue_part
from sgviz.recording.refusals import Refusal, refusal_of, refusal_words
from sgviz.recording.requests import RequestState
from sgviz.recording.routes import Route, Routes
from sgviz.recording.standings import Standings, Stay
from sgviz.recording.timeline import Doing, Timeline, timeline
from sgviz.recording.transfer_words import laid_over, transfer_parts
from sgviz.recording.transfers import Transfers, TransferState

HOST: dict[int, Cause] = {
    Doing.LOOP: Cause.LOOP,
    Doing.SCHEDULE: Cause.SCHEDULING,
    Doing.PROCESS: Cause.PROCESSING,
    Doing.HANDOVER: Cause.HANDOVER,
}


class Explainer:
    """Explains the requests of one fold; what they share is computed once."""

    def __init__(self, events: Sequence[Event], state: State, t_end: int) -> None:
        self._state, self._events = state, events
        self._routes: Routes | None = None  # read when it is first asked for
        self._t_end = t_end
        self.standings = Standings().read(events)
        self.transfers = Transfers(state.configured).read(events)
        self._held = HeldTimes(*self.standings.held)
        self._line: Timeline | None = None
        self._words: dict[tuple[int, int], tuple[tuple[str, ...], str]] = {}

    @property
    def timeline(self) -> Timeline:
        """Made when a running request is first asked about; waits alone need none."""
        if self._line is None:
            self._line = timeline(self._state.batches.values(), self.standings.idles)
        return self._line

    def queue_waits(self, request: RequestState) -> dict[Cause, int]:
        """Nanoseconds in the queue by cause, all stays together."""
        sums: dict[Cause, int] = {}
        for stay in self._stays(request):
            end = stay.end or self._t_end
            taken = self._taken_at(stay, stay.start, end)
            found = None
            if not self._held.touches(stay.start, end):
                found = stay_sums(self.standings, _plain(request.rid), stay, taken, end)
            if found is None:
                found = {}
                for part in self._held.over(self._queue(request, stay, stay.start, end)):
                    add(found, part.cause, part.duration_ns)
            for cause, ns in found.items():
                add(sums, cause, ns)
        return sums

    def explain(self, request: RequestState) -> Explanation:
        """The whole life of `request`; a parent's follows the child that ended last."""
        if (route := self.route(request)) is not None:
            return route.explanation(request.rid)
        life = self._life_of(request)
        start, end = _bounds(request, life, self._t_end)
        parts: Iterable[Part] = _whole(self._parts(request, life, start, end), start, end)
        parts = laid_over(parts, self._transfer(life), start, end)
        reached = bool(life.stats.api_server_dispatch or life.stats.scheduler_recv)
        parts = self._held.over(parts, reached=reached)
        done, refused = _is_done(request, life), refusal_words(request.status, self._refused(life))
        return Explanation(request.rid, end - start, tuple(parts), done=done, refused=refused)

    def route(self, request: RequestState) -> Route | None:
        """What a router did with it, in a router's recording."""
        if "router.paired" not in request.marks:
            return None
        if self._routes is None:
            self._routes = Routes().read(self._events)
        return self._routes.of(_plain(request.rid), request.stats.created)

    def transfer(self, life: RequestState) -> TransferState | None:
        """Its transfer, on a prefill or decode server."""
        return self.transfers.of(_plain(life.rid), life.stats.created, life.end) if life.side else None

    def _transfer(self, life: RequestState) -> list[Part]:
        state = self.transfer(life)
        return list(transfer_parts(self.transfers, state, self._t_end)) if state is not None else []

    def waiting_part(self, request: RequestState, t: int) -> tuple[int, Part] | None:
        """Since when `request` waits in the queue at `t`, and what for; None when it does not."""
        for stay in self._stays(request):
            if stay.start <= t and not (stay.end and stay.end <= t):
                parts = self._held.over(self._queue(request, stay, stay.start, max(t, stay.start + 1)))
                return stay.start, list(parts)[-1]
        return None

    def _life_of(self, request: RequestState) -> RequestState:
        """Whose way through the scheduler is followed: its own, or that of its last child."""
        by_rid = self._state.requests.by_rid
        children = [by_rid[rid] for rid in request.children if rid in by_rid]
        if not children or request.stats.wait_queue_entry:
            return request
        return max(children, key=lambda child: child.stats.completion or self._t_end)

    def _parts(self, request: RequestState, life: RequestState, start: int, end: int) -> Iterator[Part]:
        """All intervals in order; `_whole` cuts overlaps and fills gaps."""
        yield from through_controller(self._before(life, start), life)
        yield from self._in_scheduler(life, end)
        yield from self._after(request, life, end)

    # ------------------------------------------------------------ before the scheduler

    def _before(self, life: RequestState, start: int) -> Iterator[Part]:
        stats, last = life.stats, start
        for t, cause in (
            (stats.tokenize_start, Cause.CONVERT),
            (stats.tokenize_finish, Cause.TOKENIZE),
            (stats.api_server_dispatch, Cause.DISPATCH),
            (stats.scheduler_recv, Cause.INBOX),
            (life.grammar_at or stats.wait_queue_entry, Cause.INTAKE),
        ):
            if t > last:
                blockers, detail = self._busy_with(last, t) if cause is Cause.INBOX else ((), "")
                yield Part(last, t - last, cause, blockers, detail)
                last = t
        refused = self._refused(life)
        if refused is not None and refused[0] > last:
            t, cause, why = refused
            yield Part(last, t - last, cause, (), why)
        elif life.grammar_at:
            until = stats.wait_queue_entry or stats.completion or self._t_end
            yield Part(last, until - last, Cause.GRAMMAR, (), life.grammar)

    def _refused(self, life: RequestState) -> Refusal | None:
        """When the scheduler did not take the request, or it did not even get there."""
        sends = [t for t in self.standings.sends.get(_plain(life.rid), ()) if _within(t, life)]
        return refusal_of(life, self._aborts(life), sends)

    def _busy_with(self, start: int, end: int) -> tuple[tuple[str, ...], str]:
        """What kept the scheduler from its inbox."""
        _, _, doing, bids = self.timeline.cut(start, end)
        ran = bids[doing > Doing.NOTHING]
        if not len(ran):
            return (), "the scheduler was idle"
        known = (self._state.batches.get(bid) for bid in ran.tolist())
        batch = next((batch for batch in known if batch is not None and batch.planned < end), None)
        if batch is None:  # its next turn had begun, in which it takes in messages before it plans
            return (), "the scheduler was beginning its turn"
        return batch.plan.rids, f"the scheduler was busy with batch #{batch.plan.bid}"

    # ------------------------------------------------------------ in the scheduler

    def _in_scheduler(self, life: RequestState, end: int) -> Iterator[Part]:
        stats, stays = life.stats, self._stays(life)
        leaves = stats.completion or end
        for number, stay in enumerate(stays):
            following = stays[number + 1] if number + 1 < len(stays) else None
            if stay.retracted_at:
                yield from self._queue(life, stay, stay.retracted_at, stay.end or end)
            else:
                yield from self._queue(life, stay, stay.start, stay.end or end)
            if stay.end and stay.planned_in:
                until = following.retracted_at or following.start if following else leaves
                yield from self._running(life, stay, stay.end, until)

    def _queue(self, life: RequestState, stay: Stay, start: int, end: int) -> Iterator[Part]:
        """A stay in the queue, cut where the reason of the wait changes."""
        rid = _plain(life.rid)
        if stay.planned_in == stay.iteration and not stay.retracted:
            yield Part(start, end - start, Cause.PLANNING, (), "taken by the first plan after it came")
            return
        taken = self._taken_at(stay, start, end)
        yield from joined(self._waits(rid, stay, start, taken))
        if taken < end:
            yield Part(taken, end - taken, Cause.PLANNING, (), "the plan of this turn takes it", stay.bid)

    def _taken_at(self, stay: Stay, start: int, end: int) -> int:
        """When planning was no longer waited for but took place; `end` if it never did."""
        return min(max(start, self._turn_of(stay)), end) if stay.planned_in and not stay.retracted else end

    def _turn_of(self, stay: Stay) -> int:
        """When the turn began that took it; without a stamp of that, when it was taken."""
        batch = self._state.batches.get(stay.bid)
        return (batch.turn if batch else 0) or stay.admitted or stay.end

    def _waits(self, rid: str, stay: Stay, start: int, end: int) -> Iterator[Part]:
        """One part a stop of planning."""
        if end <= start:
            return
        first, last = self.standings.stops_of(stay, end)
        stops = self.standings.stops[first:last]
        if not stops or stops[0].t > start:
            first = min(stops[0].t, end) if stops else end
            yield queue_part(rid, stay, None, start, first)
        for at, stop in enumerate(stops):
            until = min(stops[at + 1].t, end) if at + 1 < len(stops) else end
            begin = max(stop.t, start)
            if until > begin:
                yield queue_part(rid, stay, stop, begin, until)

    def _running(self, life: RequestState, stay: Stay, start: int, end: int) -> Iterator[Part]:
        """From the plan that took it until it ends or is retracted: device and scheduler by turns."""
        starts, ends, doing, bids = self.timeline.cut(start, end)
        own = np.isin(bids, np.array(life.bids, dtype=np.int64)) & (doing == Doing.DEVICE)
        refusals = [
            (t, body)
            for t, body in self.standings.refused_chunks.get(_plain(life.rid), ())
            if start <= t < end
        ]
        changes = np.flatnonzero((np.diff(bids) != 0) | (np.diff(doing) != 0) | (starts[1:] != ends[:-1])) + 1
        firsts = np.concatenate(([0], changes)) if len(starts) else changes
        lasts = np.concatenate((changes, [len(starts)])) - 1
        pieces = zip(
            starts[firsts].tolist(), ends[lasts].tolist() if len(starts) else [], doing[firsts].tolist(),
            bids[firsts].tolist(), own[firsts].tolist(),
        )  # fmt: skip
        parts = (self._piece(life, stay, *piece) for piece in pieces)
        yield from _overlaid(parts, refusals) if refusals else parts

    def _piece(
        self, life: RequestState, stay: Stay, start: int, end: int, doing: int, bid: int, own: bool
    ) -> Part:
        if doing != Doing.DEVICE:
            return Part(start, end - start, HOST[doing], (), "", bid)
        batch = self._state.batches[bid]
        if own:
            return self._own_piece(life, stay, start, end, batch)
        key = (bid, 1)
        if key not in self._words:
            self._words[key] = others_words(batch)
        blockers, detail = self._words[key]
        cause = Cause.DEVICE_BUSY if batch.plan.mode == "decode" else Cause.STALLED_BY_PREFILL
        return Part(start, end - start, cause, blockers, detail, bid)

    def _own_piece(self, life: RequestState, stay: Stay, start: int, end: int, batch: BatchState) -> Part:
        plan, bid = batch.plan, batch.plan.bid
        if plan.mode == "decode":
            return Part(start, end - start, Cause.DECODE, (), self._mates(batch), bid)
        rid = _plain(life.rid)
        member = plan.rids.index(rid)
        prefix, extend = plan.prefix_lens[member], plan.extend_lens[member]
        if plan.mode == "mixed" and extend == 1 and life.stats.prefill_finished and batch.planned > stay.end:
            blockers = tuple(other for other, length in zip(plan.rids, plan.extend_lens) if length > 1)
            return Part(start, end - start, Cause.DECODE_BESIDE_PREFILL, blockers, self._mates(batch), bid)
        cause = Cause.RECOMPUTE if stay.retracted else Cause.PREFILL
        detail = (
            f"tokens {prefix} to {prefix + extend}{of_prompt(life, prefix + extend)}; {self._mates(batch)}"
        )
        return Part(start, end - start, cause, (), detail, bid)

    def _mates(self, batch: BatchState) -> str:
        key = (batch.plan.bid, 0)
        if key not in self._words:
            self._words[key] = (), batch_words(batch)
        return self._words[key][1]

    # ------------------------------------------------------------ after the scheduler

    def _after(self, request: RequestState, life: RequestState, end: int) -> Iterator[Part]:
        stats, own = life.stats, request.stats
        last = stats.completion
        if not last:
            refused = self._refused(life)
            if refused is not None:
                yield from self._response(request, refused[0], end)
                if not own.response_sent and end > refused[0]:
                    yield Part(refused[0], end - refused[0], Cause.DELIVER)
            return
        finished = own.finished or stats.finished
        for t, cause in (
            (stats.output_streamed, Cause.SEND),
            (stats.detokenized, Cause.DETOKENIZE),
            (finished, Cause.DELIVER),
        ):
            if t > last:
                yield Part(last, t - last, cause)
                last = t
        yield from self._response(request, last, end)

    def _response(self, request: RequestState, last: int, end: int) -> Iterator[Part]:
        """From the end in the tokenizer manager to the last byte: making chunks, then the client taking them."""
        if not request.stats.response_sent or end <= last:
            return
        done, slowest = self._siblings_done(request)
        if slowest and last < done <= end:
            yield Part(
                last, done - last, Cause.CHILDREN, (slowest,), f"its answer is whole when {slowest} is"
            )
            last = done
        sends = [t for t in self.standings.sends.get(_plain(request.rid), ()) if last < t <= end]
        first = sends[0] if sends else end
        yield Part(last, first - last, Cause.RESPOND)
        if end > first:
            words = f"{counted(len(sends), 'chunk')} handed over after the end"
            yield Part(first, end - first, Cause.CLIENT, (), words)

    def _siblings_done(self, request: RequestState) -> tuple[int, str]:
        """When the last of the requests that share its answer was done, and which ("": it is alone)."""
        by_rid = self._state.requests.by_rid
        parent = by_rid.get(request.parent)
        others = [by_rid[rid] for rid in parent.children if rid in by_rid] if parent else []
        last = max(others, key=lambda other: other.stats.finished, default=None)
        return (last.stats.finished, last.rid) if last is not None and last is not request else (0, "")

    # ------------------------------------------------------------ finding

    def _stays(self, life: RequestState) -> list[Stay]:
        """The stays of this life; another request of the same rid has others."""
        if life.refusal is not None:
            return []
        stays = self.standings.stays.get(_plain(life.rid), [])
        return [stay for stay in stays if _within(stay.start, life)]

    def _aborts(self, life: RequestState) -> list[tuple[int, RequestAborted]]:
        aborts = self.standings.aborts.get(_plain(life.rid), [])
        return [(t, body) for t, body in aborts if _within(t, life)]


def _plain(rid: str) -> str:
    """The rid on the wire; `#n` marks an earlier life of a rid that was used again."""
    return rid.split("#")[0]


def _within(t: int, life: RequestState) -> bool:
    start = life.stats.created or life.stats.scheduler_recv
    return t >= start and (not life.end or t <= life.end)


def _bounds(request: RequestState, life: RequestState, t_end: int) -> tuple[int, int]:
    """Arrival and last byte; what is missing in a partial recording is the nearest stamp there is."""
    stats, other = request.stats, life.stats
    firsts = (stats.created, other.created, other.tokenize_start, other.scheduler_recv, other.completion)
    start = next((t for t in firsts if t), 0)
    lasts = (stats.response_sent, stats.finished, other.finished)
    end = next((t for t in lasts if t), 0)
    if not end:
        streamed = max(other.output_streamed if other.completion else 0, other.completion)
        end = streamed or t_end
    return start, max(start, end)


def _whole(parts: Iterable[Part], start: int, end: int) -> Iterator[Part]:
    """The parts from `start` to `end`: overlaps go to the earlier part, gaps are unexplained."""
    last = start
    for part in parts:
        first, behind = part.start_ns, part.end_ns
        begin, until = max(first, last), min(behind, end)
        if until <= begin:
            continue
        if begin > last:
            yield Part(last, begin - last, Cause.UNEXPLAINED)
        if begin == first and until == behind:
            yield part
        else:
            yield Part(begin, until - begin, part.cause, part.blockers, part.detail, part.bid)
        last = until
    if last < end:
        yield Part(last, end - last, Cause.UNEXPLAINED)


def _overlaid(parts: Iterable[Part], refusals: Sequence[tuple[int, AdmitRefused]]) -> Iterator[Part]:
    """Where the next piece of its prompt was refused, that is the cause until its next batch."""
    at, current = 0, None
    for part in parts:
        while at < len(refusals) and refusals[at][0] <= part.start_ns:
            current, at = refusals[at][1], at + 1
        if part.cause in (Cause.PREFILL, Cause.RECOMPUTE):
            current = None
        if current is None:
            yield part
            continue
        holders = tuple(rid for rid, _ in current.holders)
        detail = f"the next piece of its prompt needs {current.need:,}, there are {current.have:,}"
        yield Part(part.start_ns, part.duration_ns, Cause(current.reason.value), holders, detail, part.bid)


def _is_done(request: RequestState, life: RequestState) -> bool:
    """Its end was seen; where only the scheduler was recorded, its end there."""
    return bool(request.end or (not request.stats.created and life.stats.completion))
