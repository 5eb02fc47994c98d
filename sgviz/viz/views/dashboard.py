"""The dashboard: figures, lines over time, the strip of batches, a lane a request. Imports: events, recording."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from sgviz.events.schema import (
    BatchPlanned,
    Event,
    RequestFinished,
    RequestRetracted,
    TokensSampled,
    TraceCost,
)
from sgviz.recording.fold import BatchState, State
from sgviz.recording.moment import Moment
from sgviz.recording.requests import RequestState
from sgviz.recording.tables import first_token_ns, tpot_ms
from sgviz.viz.views.models import BatchBar, DashboardView, Lane, Numbers, Sample

SECOND_NS = 1_000_000_000
SAMPLES = 600
SAMPLE_EVERY_NS = 20_000_000
BARS = 120
LANES = 36
RECENT = 64  # requests whose latencies make the medians
PREBUILT = "prebuilt"  # mode of a batch whose prompts another server computed


@dataclass(slots=True)
class Counters:
    """What the state does not keep: sums, and what happened lately."""

    retracted: int = 0
    ended: int = 0
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)
    cost_history: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    tokens: deque[tuple[int, int]] = field(default_factory=deque)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    history: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    total: int = 0
    t0: int = 0
    _sampled: int = 0

    def apply(self, event: Event) -> None:
        """Count one event."""
        self.t0 = self.t0 or event.t
        match event.body:
            case TokensSampled(token_ids=ids):
                self._count_tokens(event.t, len(ids))
            case BatchPlanned():
                self._sample(event, event.body)
            case RequestRetracted():
                self.retracted += 1
                self.history.append((event.t, self.retracted, self.ended))
            case RequestFinished():
                self.ended += 1
                self.history.append((event.t, self.retracted, self.ended))
            case TraceCost(events=events, cost_ns=cost):
                self.costs[event.component] = (events, cost)
                told, spent = (sum(column) for column in zip(*self.costs.values(), strict=True))
                self.cost_history.append((event.t, told, spent))

    def per_second(self, t: int) -> float:
        """Tokens sampled in the second up to `t`."""
        return float(sum(count for at, count in self.tokens if t - SECOND_NS < at <= t))

    def until(self, t: int) -> tuple[int, int]:
        """Retractions and ended requests up to `t`, as far back as it is remembered."""
        found = next(((r, e) for at, r, e in reversed(self.history) if at <= t), None)
        return found if found is not None else (0, 0)

    def cost_until(self, t: int) -> tuple[int, int]:
        """Events and what they cost in ns, as last told up to `t`."""
        return next(((n, ns) for at, n, ns in reversed(self.cost_history) if at <= t), (0, 0))

    def _count_tokens(self, t: int, count: int) -> None:
        self.tokens.append((t, count))
        while self.tokens[0][0] < t - 60 * SECOND_NS:  # a minute to scrub back in
            self.tokens.popleft()
        recent = 0
        for at, number in reversed(self.tokens):
            if at <= t - SECOND_NS:
                break
            recent += number
        self._sampled = recent

    def _sample(self, event: Event, body: BatchPlanned) -> None:
        """One at most every 20 ms, so that the lines cover a stretch that one can look at."""
        t_ms = (event.t - self.t0) / 1e6
        if self.samples and t_ms - self.samples[-1].t_ms < SAMPLE_EVERY_NS / 1e6:
            return
        pools = body.kv_free + body.kv_evictable + body.kv_protected
        private = max(0, self.total - pools)
        self.samples.append(
            Sample(
                t_ms=t_ms, running=body.running, waiting=body.waiting, free=body.kv_free,
                evictable=body.kv_evictable, protected=body.kv_protected, private=private,
                per_second=float(self._sampled),
            )
        )  # fmt: skip


def dashboard(now: Moment, state: State, counters: Counters, t0: int, dropped: int) -> DashboardView:
    """The dashboard at a moment; what came later is left out, and batches that no device runs."""
    requests = [each for each in state.requests.by_rid.values() if _began(each) <= now.t or not now.t]
    shown = _chosen(requests, now.t)
    ran = (batch for batch in state.batches.values() if batch.plan.mode != PREBUILT)
    batches = [batch for batch in ran if batch.planned <= now.t]
    return DashboardView(
        numbers=_numbers(now, requests, counters, dropped),
        samples=tuple(sample for sample in counters.samples if sample.t_ms <= now.t_ms),
        batches=tuple(_bar(batch, t0, now.t) for batch in batches[-BARS:]),
        lanes=tuple(_lane(request, t0, now.t) for request in shown),
        hidden=len(requests) - len(shown),
    )


def _numbers(now: Moment, requests: list[RequestState], counters: Counters, dropped: int) -> Numbers:
    ended = [each for each in requests if 0 < each.stats.finished <= now.t][-RECENT:]
    first = [(first_token_ns(each) - each.stats.created) / 1e6 for each in ended if first_token_ns(each)]
    steps = [step for each in ended if (step := tpot_ms(each)) == step]  # NaN: fewer than two tokens
    events, cost = counters.cost_until(now.t)
    retracted, done = counters.until(now.t)
    return Numbers(
        seq=now.count, t_ms=now.t_ms, iteration=now.iteration, running=len(now.running),
        waiting=len(now.waiting), retracted=retracted, free=now.free, evictable=now.evictable,
        protected=now.protected, private_total=now.private_total, total=now.total, exact=now.exact,
        tree_exact=now.tree_exact, idle=now.idle, per_second=0.0 if now.idle else counters.per_second(now.t),
        ttft_ms=median(first) if first else None, itl_ms=median(steps) if steps else None, ended=done,
        trace_ns=cost / events if events else None, trace_events=events, dropped=dropped,
    )  # fmt: skip


def _began(request: RequestState) -> int:
    return request.phases[0].start if request.phases else request.stats.created


def _chosen(requests: list[RequestState], t: int) -> list[RequestState]:
    """Those that live come first, then the newest that ended; in the order of arrival."""
    live = [each for each in requests if not each.end or each.end > t]
    live = live[:LANES]
    over = [each for each in requests if each.end and each.end <= t]
    newest = list(islice(reversed(over), LANES - len(live)))
    return sorted([*newest, *live], key=_began)


def _lane(request: RequestState, t0: int, t: int) -> Lane:
    phases = tuple(
        (phase.name.value, (phase.start - t0) / 1e6, (phase.end - t0) / 1e6 if 0 < phase.end <= t else 0.0)
        for phase in request.phases
        if phase.start <= t
    )
    done = 0 < request.end <= t
    return Lane(
        rid=request.rid, phases=phases, tokens=request.sampled, retractions=request.retractions, done=done
    )


def _bar(batch: BatchState, t0: int, t: int) -> BatchBar:
    plan = batch.plan
    ended = 0 < batch.end <= t
    tokens = sum(plan.extend_lens) if plan.mode != "decode" else len(plan.rids)
    return BatchBar(
        bid=plan.bid, mode=plan.mode, start_ms=((batch.start or batch.planned) - t0) / 1e6,
        end_ms=(batch.end - t0) / 1e6 if ended else 0.0, members=len(plan.rids), tokens=tokens,
    )  # fmt: skip
