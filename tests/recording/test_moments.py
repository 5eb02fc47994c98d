"""The state at any moment is the engine's true state then, and a jump gives what folding from the start gives."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from random_runs import cases, run
from timed_rig import TimedRig
from workload import Step, crowd

from sgviz.errors import BadRequest
from sgviz.recording import Header, Recording
from sgviz.recording.fold import Folded
from sgviz.recording.moment import moment

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check(case: tuple[dict[str, object], list[Step]]) -> None:
    rig, truths = run(*case)
    events = rig.events()
    folded = Folded(rig.configured(), every=97).extend(events)
    assert not folded.state.differences
    for truth in truths:
        truth.compare(moment(folded.keyframes.after(events, truth.count), truth.count, events[0].t))


@profile(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_any_moment_is_the_engine_s_true_state(case: tuple[dict[str, object], list[Step]]) -> None:
    check(case)


@pytest.mark.long
@profile(max_examples=2000, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_any_moment_is_the_engine_s_true_state_long(case: tuple[dict[str, object], list[Step]]) -> None:
    check(case)


@pytest.mark.parametrize("overlap", [True, False])
def test_crowded_runs_retract_chunk_and_evict_and_the_fold_follows(overlap: bool) -> None:
    config: dict[str, object] = {
        "tokens": 192,
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.001,
        "disable_overlap_schedule": not overlap,
    }
    check((config, crowd(3)))
    kinds = set(run(config, crowd(3))[0].recording().events.kind)
    assert {"request.retracted", "chunk.cut", "tree.evicted", "request.aborted"} <= kinds


def simple(seed: int = 0) -> Recording:
    rig, rng = TimedRig(tokens=256), random.Random(seed)
    for _ in range(12):
        rig.submit([rng.randrange(97) for _ in range(rng.randrange(4, 60))], 12)
        for _ in range(5):
            rig.stop()
    rig.run()
    return rig.recording()


def test_jumps_by_iteration_time_and_count_agree() -> None:
    rec = simple()
    events = rec.stamped()
    last = max(event.iteration for event in events)
    for iteration in range(1, last + 1):
        at = rec.at(iteration=iteration)
        before = [event for event in events if event.iteration <= iteration]
        assert at.count == len(before) and at == rec.at(count=len(before))
        assert at.iteration <= iteration
    for event in events[:: max(1, len(events) // 20)]:
        at = rec.at(time=(event.t - rec.t0) / 1e6)
        assert at.count == sum(other.t <= event.t for other in events)
    assert rec.at() == rec.at(count=len(events)) and rec.at().idle


def test_moments_that_do_not_exist_are_refused() -> None:
    rec = simple()
    with pytest.raises(BadRequest, match="after the last one recorded"):
        rec.at(iteration=10_000)
    with pytest.raises(BadRequest, match="before the first"):
        rec.at(iteration=0)
    with pytest.raises(BadRequest, match="one of iteration, time and count"):
        rec.at(iteration=1, time=2.0)
    with pytest.raises(BadRequest, match="not between"):
        rec.at(count=-1)


def test_before_the_first_event_nothing_waits_and_all_is_free() -> None:
    rec = simple()
    start = rec.at(count=0)
    assert start.waiting == start.running == start.tree == () and start.free == start.total > 0


def test_folding_in_pieces_is_folding_at_once() -> None:
    rig = TimedRig(tokens=256)
    rec = Recording.live(rig.ring.snapshot, Header(configured=rig.configured()), total=lambda: rig.ring.total)
    rng = random.Random(1)
    for _ in range(10):
        rig.submit([rng.randrange(97) for _ in range(30)], 12)
        for _ in range(7):
            rig.stop()
        assert rec.at().count == rig.ring.total  # folds what is new
    rig.run()
    whole = rig.recording()
    assert rec.kv.equals(whole.kv) and rec.requests.equals(whole.requests)
    assert rec.fold().state == whole.fold().state
