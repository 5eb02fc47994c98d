"""Each cause of waiting once: the explanation names it where the engine's own budgets show it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from recording_checks import seamless
from timed_rig import TimedRig

from sgviz.batch.req import Req
from sgviz.events.schema import (
    AdmitOk,
    BatchPlanned,
    Body,
    Event,
    QueueEntered,
    Reason,
    ScanStopped,
)
from sgviz.recording import Cause, Part, Recording
from sgviz.recording.explanation import WAITS
from sgviz.recording.queue_words import queue_part
from sgviz.recording.standings import Standings
from sgviz.scheduler.stops import Stop


def _admitted(rid: str) -> AdmitOk:
    return AdmitOk(
        rid=rid, extend=4, prefix=0, need=4, have=99, reserved=4, chunked=False, rem_total=90, rem_input=90,
        rem_chunk=90,
    )  # fmt: skip


# ---------------------------------------------------------------- each cause once, against the engine's own budgets


@dataclass
class Oracle:
    """Watches one request's wait from the engine's objects alone: a budget is short at a stop, and who has it."""

    rig: TimedRig
    rid: str
    short: Callable[[Req], bool]
    holders: Callable[[], list[str]]
    times: list[int] = field(default_factory=list)
    named: dict[str, None] = field(default_factory=dict)

    def look(self) -> None:
        state = self.rig.state
        req = next((req for req in state.waiting_queue if req.rid == self.rid), None)
        if req is not None and self.short(req):
            self.times.append(self.rig.clock.now())
            self.named |= dict.fromkeys(self.holders())

    def confirms(self, rec: Recording, cause: Cause) -> list[Part]:
        """Wherever the oracle saw the budget short, the explanation names the cause and only holders it saw."""
        explanation = rec.explain(self.rid)
        seamless(explanation)
        assert self.times, "the workload did not provoke the cause"
        parts = [part for part in explanation.parts if part.cause is cause]
        assert parts, explanation.text()
        inside = [t for t in self.times if any(part.start_ns <= t <= part.end_ns for part in parts)]
        assert len(inside) == len(self.times), (self.times, explanation.text())
        for part in parts:
            assert part.blockers and set(part.blockers) <= set(self.named), (part, self.named)
            assert part.detail
        return parts


def play(rig: TimedRig, oracle: Oracle) -> Recording:
    """Run to the end, asking the oracle after every plan."""
    for _ in range(20_000):
        stop = rig.stop()
        if stop is Stop.PLANNED:
            oracle.look()
        if stop is Stop.IDLE and rig.state.is_fully_idle and not rig.inbox.messages:
            return rig.recording()
    raise AssertionError("not idle")


def running(rig: TimedRig) -> list[str]:
    """Who is past the queue, by the engine's own list."""
    waiting = {req.rid for req in rig.state.waiting_queue}
    return [rid for rid in rig.state.live if rid not in waiting]


def planned(rig: TimedRig) -> list[str]:
    """Who is in the batch just planned."""
    return [req.rid for req in rig.state.last_batch.reqs] if rig.state.last_batch else []


def reserved(rig: TimedRig, req: Req) -> float:
    """What the request asks of memory beyond what is free of promises."""
    others = [other for other in rig.state.live.values() if other.rid in running(rig)]
    promised = sum(max(other.max_new_tokens - len(other.output_ids), 0) for other in others)
    room = rig.state.cache.room() - promised * rig.state.ratio.current
    return req.seqlen + req.max_new_tokens - room


LOOPS = pytest.mark.parametrize("overlap", [True, False])


@LOOPS
def test_kv_full_names_who_holds_the_memory(overlap: bool) -> None:
    rig = TimedRig(tokens=200, disable_overlap_schedule=not overlap)
    rig.submit(range(80), 60, rid="big", ignore_eos=True)
    for _ in range(8):
        rig.stop()
    rig.submit(range(50, 90), 40, rid="waits")
    oracle = Oracle(rig, "waits", lambda req: reserved(rig, req) >= 0, lambda: running(rig))
    parts = oracle.confirms(play(rig, oracle), Cause.KV)
    assert parts[0].blockers == ("big",) and "KV tokens" in parts[0].detail and "big (" in parts[0].detail


@LOOPS
def test_running_slots_name_who_runs(overlap: bool) -> None:
    rig = TimedRig(max_running_requests=2, disable_overlap_schedule=not overlap)
    for rid in ("a", "b"):
        rig.submit(range(10), 30, rid=rid, ignore_eos=True)
    for _ in range(8):
        rig.stop()
    rig.submit(range(20, 40), 8, rid="waits")
    oracle = Oracle(rig, "waits", lambda req: len(running(rig)) >= 2, lambda: running(rig))
    parts = oracle.confirms(play(rig, oracle), Cause.RUNNING_SLOTS)
    assert set(parts[0].blockers) == {"a", "b"}


@LOOPS
def test_chunk_budget_names_who_used_it(overlap: bool) -> None:
    rig = TimedRig(chunked_prefill_size=32, disable_overlap_schedule=not overlap, disable_radix_cache=True)
    rig.submit(range(96), 4, rid="long")
    rig.submit(range(20), 4, rid="waits")
    used = lambda req: rig.state.last_batch is not None and sum(rig.state.last_batch.extend_lens) >= 32  # noqa: E731
    oracle = Oracle(rig, "waits", used, lambda: planned(rig))
    parts = oracle.confirms(play(rig, oracle), Cause.CHUNK_BUDGET)
    assert parts[0].blockers == ("long",)


@LOOPS
def test_prefill_budget_names_who_used_it(overlap: bool) -> None:
    rig = TimedRig(chunked_prefill_size=-1, max_prefill_tokens=48, disable_overlap_schedule=not overlap)
    rig.submit(range(40), 4, rid="first")
    rig.submit(range(50, 90), 4, rid="waits")
    used = lambda req: planned(rig) == ["first"] and rig.state.last_batch.forward_mode.is_extend  # type: ignore[union-attr]  # noqa: E731
    oracle = Oracle(rig, "waits", used, lambda: planned(rig))
    parts = oracle.confirms(play(rig, oracle), Cause.PREFILL_BUDGET)
    assert parts[0].blockers == ("first",)


@LOOPS
def test_the_number_of_requests_in_a_batch_is_named(overlap: bool) -> None:
    rig = TimedRig(prefill_max_requests=1, disable_overlap_schedule=not overlap)
    rig.submit(range(10), 4, rid="first")
    rig.submit(range(20, 40), 4, rid="waits")
    used = lambda req: planned(rig) == ["first"] and rig.state.last_batch.forward_mode.is_extend  # type: ignore[union-attr]  # noqa: E731
    oracle = Oracle(rig, "waits", used, lambda: planned(rig))
    oracle.confirms(play(rig, oracle), Cause.MAX_REQUESTS)


@LOOPS
def test_head_of_line_names_the_head_and_what_it_lacks(overlap: bool) -> None:
    rig = TimedRig(tokens=200, disable_overlap_schedule=not overlap)
    rig.submit(range(80), 60, rid="big", ignore_eos=True)
    for _ in range(8):
        rig.stop()
    rig.submit(range(50, 90), 40, rid="head")
    rig.submit(range(5), 2, rid="waits")
    behind = lambda req: rig.state.waiting_queue[0].rid == "head"  # noqa: E731
    oracle = Oracle(rig, "waits", behind, lambda: [rig.state.waiting_queue[0].rid])
    parts = oracle.confirms(play(rig, oracle), Cause.HEAD_OF_LINE)
    assert parts[0].blockers == ("head",) and "kv" in parts[0].detail


@LOOPS
def test_policy_order_names_who_came_later_and_went_first(overlap: bool) -> None:
    rig = TimedRig(max_running_requests=1, schedule_policy="lof", disable_overlap_schedule=not overlap)
    rig.submit(range(10), 3, rid="waits")
    rig.submit(range(20), 40, rid="later", ignore_eos=True)
    passed = lambda req: running(rig) == ["later"]  # noqa: E731
    oracle = Oracle(rig, "waits", passed, lambda: running(rig))
    parts = oracle.confirms(play(rig, oracle), Cause.POLICY_ORDER)
    assert parts[0].blockers == ("later",)


@LOOPS
def test_fcfs_names_no_policy_and_nobody_waits_for_himself(overlap: bool) -> None:
    """What is taken in a plan that then stops at a later request waited for that plan, not for the later one."""
    rig = TimedRig(tokens=400, max_running_requests=2, disable_overlap_schedule=not overlap)
    for number in range(8):
        rig.submit(range(10 * number, 10 * number + 12), 6 + number, rid=f"r{number}", ignore_eos=True)
    rig.run()
    rec = rig.recording()
    taken = {event.body.rid: event.t for event in rig.events() if isinstance(event.body, AdmitOk)}
    for rid in rec.rids:
        explanation = rec.explain(rid)
        seamless(explanation)
        causes = {part.cause for part in explanation.parts}
        assert Cause.POLICY_ORDER not in causes and all(
            rid not in part.blockers for part in explanation.parts
        )
        waits = [part for part in explanation.parts if part.cause in WAITS]
        assert waits[-1].cause is Cause.PLANNING and waits[-1].end_ns >= taken[rid], explanation.text()


def test_a_stop_told_after_the_own_admission_is_no_cause() -> None:
    """As in a plan whose scan takes a while after it took the request."""
    standings = Standings()
    clock = itertools.count(100, 100)

    def tell(iteration: int, body: Body) -> None:
        t = next(clock)
        standings.read([Event(seq=t, t=t, component="scheduler", iteration=iteration, body=body)])

    for rid in ("mine", "later"):
        tell(1, QueueEntered(rid=rid, position=0, prompt_tokens=4, max_new_tokens=4, stream=False))
    tell(2, _admitted("mine"))
    tell(2, ScanStopped(rid="later", reason=Reason.RUNNING_SLOTS, behind=0))
    (stay,), (stop,) = standings.stays["mine"], standings.stops
    assert stay.admitted < stop.t and not stop.sorted
    part = queue_part("later", standings.stays["later"][0], stop, stop.t, stop.t + 50)
    assert part.cause is Cause.RUNNING_SLOTS and part.blockers == ("mine",)
    assert queue_part("mine", stay, stop, stop.t, stop.t + 50).cause is not Cause.POLICY_ORDER


def test_the_inbox_names_only_a_batch_that_was_under_way() -> None:
    rig = TimedRig(tokens=400)
    for number in range(6):
        rig.submit(range(10 * number, 10 * number + 12), 6, rid=f"r{number}", ignore_eos=True)
        for _ in range(3):
            rig.stop()
    rig.run()
    planned = {f"#{e.body.bid}": e.t for e in rig.events() if isinstance(e.body, BatchPlanned)}
    rec = rig.recording()
    explainer = rec.explainer()
    starts = sorted(planned.values())
    for start, end in itertools.pairwise(starts):
        for until in (start + 1, (start + end) // 2, end):
            _, words = explainer._busy_with(start - 1_000, until)
            named = [t for bid, t in planned.items() if words.endswith(f"batch {bid}")]
            assert all(t < until for t in named), words


@LOOPS
def test_retraction_says_when_why_and_who_ran_on(overlap: bool) -> None:
    rig = TimedRig(tokens=96, schedule_conservativeness=0.001, disable_overlap_schedule=not overlap)
    rig.submit(range(30), 45, rid="a")
    for _ in range(10):
        rig.stop()
    rig.submit(range(40, 60), 30, rid="b")
    retracted: dict[str, list[int]] = {}
    others: dict[str, None] = {}
    for _ in range(20_000):
        stop = rig.stop()
        for req in rig.state.waiting_queue:
            if req.retraction_count:
                retracted.setdefault(req.rid, []).append(rig.clock.now())
                others |= dict.fromkeys(running(rig))
        if stop is Stop.IDLE and rig.state.is_fully_idle:
            break
    rec = rig.recording()
    ((rid, times),) = retracted.items()
    explanation = rec.explain(rid)
    seamless(explanation)
    parts = [part for part in explanation.parts if part.cause is Cause.RETRACTION]
    assert parts and all(any(part.start_ns <= t <= part.end_ns for part in parts) for t in times)
    for part in parts:
        assert part.blockers and set(part.blockers) <= set(others) and "gave up its KV" in part.detail
    assert any(part.cause is Cause.RECOMPUTE for part in explanation.parts)


def test_a_chunked_prompt_says_its_pieces_and_who_was_stalled() -> None:
    rig = TimedRig(chunked_prefill_size=32, disable_radix_cache=True)
    rig.submit(range(10), 30, rid="decodes", ignore_eos=True)
    for _ in range(8):
        rig.stop()
    rig.submit(range(96), 4, rid="long")
    rig.run()
    rec = rig.recording()
    pieces = [part.detail.split(";")[0] for part in rec.explain("long").parts if part.cause is Cause.PREFILL]
    assert pieces == ["tokens 0 to 32 of 96", "tokens 32 to 64 of 96", "tokens 64 to 96 of 96"]
    stalls = [part for part in rec.explain("decodes").parts if part.cause is Cause.STALLED_BY_PREFILL]
    assert stalls and all(part.blockers == ("long",) for part in stalls)


def test_mixed_batches_slow_the_decoding_members() -> None:
    rig = TimedRig(chunked_prefill_size=32, enable_mixed_chunk=True, disable_radix_cache=True)
    rig.submit(range(10), 30, rid="decodes", ignore_eos=True)
    for _ in range(8):
        rig.stop()
    rig.submit(range(96), 4, rid="long")
    rig.run()
    beside = [p for p in rig.recording().explain("decodes").parts if p.cause is Cause.DECODE_BESIDE_PREFILL]
    assert beside and all(part.blockers == ("long",) for part in beside)
