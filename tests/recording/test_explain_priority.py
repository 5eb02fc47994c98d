"""Priorities in the explanation: who made way for whom, who was passed, and that every ns still has one cause."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from recording_checks import seamless
from timed_rig import TimedRig
from workload import crowd, submit

from sgviz.events.schema import RequestRetracted
from sgviz.recording import Cause
from sgviz.scheduler.stops import Stop

ON = {"enable_priority_scheduling": True, "schedule_conservativeness": 1.0}
LOOPS = pytest.mark.parametrize("overlap", [True, False])


def until(rig: TimedRig, rid: str, tokens: int) -> None:
    rig.until_true(lambda: len(rig.answers[rid].output_ids) >= tokens)


@LOOPS
def test_a_preempted_request_names_who_it_made_way_for(overlap: bool) -> None:
    rig = TimedRig(tokens=200, disable_overlap_schedule=not overlap, **ON)
    rig.submit(range(60), 40, rid="low", priority=0, ignore_eos=True)
    until(rig, "low", 4)
    rig.submit(range(50, 90), 100, rid="high", priority=30, ignore_eos=True)
    waited: list[int] = []
    for _ in range(20_000):
        stop = rig.stop()
        if any(req.rid == "low" and req.retraction_count for req in rig.state.waiting_queue):
            waited.append(rig.clock.now())
        if stop is Stop.IDLE and rig.state.is_fully_idle:
            break
    rec = rig.recording()
    explanation = rec.explain("low")
    seamless(explanation)
    parts = [part for part in explanation.parts if part.cause is Cause.PRIORITY]
    assert waited and all(any(part.start_ns <= t <= part.end_ns for part in parts) for t in waited)
    assert all(part.blockers == ("high",) for part in parts), parts
    assert "preempted by high" in parts[0].detail and "output token" in parts[0].detail
    assert Cause.RETRACTION not in {part.cause for part in explanation.parts}
    assert any(part.cause is Cause.RECOMPUTE for part in explanation.parts)
    (row,) = rec.decisions.query("verdict == 'retracted'").itertuples()
    assert (row.rid, row.reason, row.holders) == ("low", "priority", (("high", row.need),))


@LOOPS
def test_one_that_was_passed_names_who_came_later_and_goes_first(overlap: bool) -> None:
    rig = TimedRig(max_running_requests=1, disable_overlap_schedule=not overlap, **ON)
    rig.submit(range(10), 20, rid="runs", priority=9, ignore_eos=True)
    until(rig, "runs", 2)
    rig.submit(range(20, 40), 3, rid="waits", priority=1)
    rig.submit(range(40, 60), 12, rid="later", priority=5, ignore_eos=True)
    rig.run()
    explanation = rig.recording().explain("waits")
    seamless(explanation)
    parts = [part for part in explanation.parts if part.cause is Cause.PRIORITY]
    assert parts and {blocker for part in parts for blocker in part.blockers} == {"later"}
    assert Cause.POLICY_ORDER not in {part.cause for part in explanation.parts}


def test_among_equals_it_is_the_policy() -> None:
    rig = TimedRig(max_running_requests=1, schedule_policy="lof", **ON)
    rig.submit(range(10), 20, rid="runs", priority=9, ignore_eos=True)
    until(rig, "runs", 2)
    rig.submit(range(20, 40), 3, rid="waits", priority=1)
    rig.submit(range(40, 60), 12, rid="longer", priority=1, ignore_eos=True)
    rig.run()
    causes = {part.cause: part for part in rig.recording().explain("waits").parts}
    assert Cause.PRIORITY not in causes and causes[Cause.POLICY_ORDER].blockers == ("longer",)


def test_who_waits_for_the_room_of_a_victim_says_so() -> None:
    rig = TimedRig(tokens=200, max_running_requests=4, **ON)
    rig.submit(range(90), 90, rid="victim", priority=5, ignore_eos=True)
    until(rig, "victim", 2)
    rig.submit(range(30), 20, rid="lower", priority=0)
    for _ in range(4):
        rig.stop()
    rig.submit(range(50, 80), 30, rid="high", priority=40)
    rig.run()
    parts = [part for part in rig.recording().explain("lower").parts if part.cause is Cause.PRIORITY]
    assert any("victim" in part.detail for part in parts), parts


@profile(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 10]), st.sampled_from([None, 2]))
def test_sums_are_exact_whatever_makes_way(
    seed: int, overlap: bool, threshold: int, slots: int | None
) -> None:
    rig = TimedRig(
        tokens=256, context_len=160, eos_every=83, disable_overlap_schedule=not overlap, max_running_requests=slots,
        enable_priority_scheduling=True, priority_scheduling_preemption_threshold=threshold, chunked_prefill_size=33,
    )  # fmt: skip
    for number, step in enumerate(step for step in crowd(seed, 14) if hasattr(step, "head")):
        submit(rig, step, f"r{number}")
        for _ in range(3):
            rig.stop()
    rig.run()
    rec = rig.recording()
    told = {event.body.rid: event.body for event in rig.events() if isinstance(event.body, RequestRetracted)}
    waits = rec.waits.set_index("rid")
    for rid in rec.rids:
        explanation = rec.explain(rid)
        seamless(explanation)
        by_cause = explanation.by_cause()
        for cause, ns in by_cause.items():
            assert waits.loc[rid, f"{cause}_ms"] == pytest.approx(ns / 1e6)
        if rid in told:
            assert by_cause.get(Cause.PRIORITY if told[rid].preempted_by else Cause.RETRACTION, 0) > 0
    assert not rec.check() and rec.audit().balanced
