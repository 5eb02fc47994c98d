"""Running requests make way for a waiting one of a higher priority: who, when, when not, and that nobody notices."""

from __future__ import annotations

import random

import pytest
from rig import Rig
from workload import crowd, submit

from sgviz.batch.req import Req
from sgviz.cache.kv_cache import Match
from sgviz.events.schema import AdmitOk, RequestRetracted, RowReturned
from sgviz.scheduler.preemption import fewest
from sgviz.scheduler.prefill_adder import PrefillAdder
from sgviz.scheduler.stops import Stop
from sgviz.scheduler.supposition import Supposition

ON = {"enable_priority_scheduling": True, "schedule_conservativeness": 1.0}
LOOPS = pytest.mark.parametrize("overlap", [False, True])


def preempted(rig: Rig) -> list[tuple[str, str]]:
    """`(victim, for whom)` in order."""
    return [(body.rid, body.preempted_by) for body in rig.bodies(RequestRetracted) if body.preempted_by]


def start(rig: Rig, *wanted: tuple[str, int | None, int, int]) -> None:
    """Requests `(rid, priority, prompt, max_new)` that run and have two tokens at least."""
    for number, (rid, priority, prompt, max_new) in enumerate(wanted):
        ids = [(number * 17 + i) % 97 for i in range(prompt)]
        rig.submit(ids, max_new, rid=rid, priority=priority, ignore_eos=True, logprob=True)
        rig.until_true(lambda rid=rid: len(rig.answers[rid].output_ids) >= 2)


def answers_without_pressure(rig: Rig) -> None:
    """Every answer of `rig` is the same as where nobody waits for anything."""
    calm = Rig(tokens=4000, disable_radix_cache=True)
    prompts = {body.rid: body for body in rig.bodies(AdmitOk)}
    assert set(prompts) >= set(rig.answers)
    for rid, answer in rig.answers.items():
        calm.submit(PROMPTS[rid], len(answer.output_ids), rid=rid, ignore_eos=True, logprob=True)
    calm.run()
    for rid, answer in rig.answers.items():
        right = calm.answers[rid]
        assert answer.output_ids == right.output_ids and answer.decode_ids == right.decode_ids, rid
        assert answer.logprobs == right.logprobs and sum(answer.deltas) == len(right.output_ids), rid


PROMPTS = {
    "low": [i % 97 for i in range(30)],
    "mid": [(i * 3 + 1) % 97 for i in range(30)],
    "high": [(i * 5 + 2) % 97 for i in range(30)],
}


@LOOPS
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
def test_the_victim_resumes_as_if_nothing_had_been(overlap: bool, page_size: int, radix: bool) -> None:
    rig = Rig(
        tokens=160,
        page_size=page_size,
        disable_overlap_schedule=not overlap,
        disable_radix_cache=not radix,
        **ON,
    )
    for rid, priority, max_new in (("low", 0, 60), ("mid", 5, 30)):
        rig.submit(PROMPTS[rid], max_new, rid=rid, priority=priority, ignore_eos=True, logprob=True)
        rig.until_true(lambda rid=rid: len(rig.answers[rid].output_ids) >= 4)
    rig.submit(PROMPTS["high"], 50, rid="high", priority=30, ignore_eos=True, logprob=True)
    for _ in range(4000):
        rig.check()
        if rig.stop() is Stop.IDLE and rig.state.is_fully_idle:
            break
    rig.check_empty()
    assert preempted(rig) and preempted(rig)[0] == ("low", "high")
    assert rig.answers["low"].retractions >= 1 and rig.answers["high"].retractions == 0
    assert [len(rig.answers[rid].output_ids) for rid in ("low", "mid", "high")] == [60, 30, 50]
    assert rig.answers["low"].deltas == [1] * 60  # one by one, none twice
    answers_without_pressure(rig)


@LOOPS
@pytest.mark.parametrize(("running", "goes"), [(9, True), (10, False)])
def test_the_difference_must_be_above_the_threshold(overlap: bool, running: int, goes: bool) -> None:
    """Threshold 10: 20 waits for 10 and not for 9."""
    rig = Rig(max_running_requests=1, disable_overlap_schedule=not overlap, **ON)
    start(rig, ("runs", running, 10, 40))
    rig.submit(range(10), 5, rid="new", priority=20)
    rig.run()
    assert preempted(rig) == ([("runs", "new")] if goes else [])
    rig.check_empty()


def test_smaller_values_first_preempts_larger_ones() -> None:
    rig = Rig(max_running_requests=1, schedule_low_priority_values_first=True, **ON)
    start(rig, ("runs", 30, 10, 40))
    rig.submit(range(10), 5, rid="new", priority=1)
    rig.run()
    assert preempted(rig) == [("runs", "new")]


def test_never_for_an_equal_one() -> None:
    rig = Rig(max_running_requests=1, priority_scheduling_preemption_threshold=0, **ON)
    start(rig, ("runs", 5, 10, 40))
    rig.submit(range(10), 5, rid="new", priority=5)
    rig.run()
    assert preempted(rig) == []


def test_not_where_it_is_switched_off() -> None:
    rig = Rig(max_running_requests=1, disable_priority_preemption=True, **ON)
    start(rig, ("runs", 0, 10, 40))
    rig.submit(range(10), 5, rid="new", priority=99)
    rig.run()
    assert preempted(rig) == []


def test_the_worst_goes_first_and_of_equals_the_newest() -> None:
    rig = Rig(max_running_requests=4, **ON)
    start(rig, ("a", 5, 10, 60), ("b", 2, 10, 60), ("c", 2, 10, 60), ("d", 7, 10, 60))
    rig.submit(range(10), 50, rid="new", priority=40, ignore_eos=True)
    rig.until_true(lambda: bool(preempted(rig)))
    assert preempted(rig) == [("c", "new")]
    rig.submit(range(10), 50, rid="newer", priority=40, ignore_eos=True)
    rig.until_true(lambda: len(preempted(rig)) == 2)
    assert preempted(rig)[1] == ("b", "newer")
    rig.run()
    rig.check_empty()


def test_as_few_as_it_takes_and_none_that_turns_out_not_to_be_needed() -> None:
    """The worst one holds too little; with the next the room suffices, and then that one alone would do."""
    rig = Rig(tokens=256, **ON)
    start(rig, ("small", 0, 8, 6), ("large", 1, 90, 60), ("top", 90, 10, 20))
    rig.submit(range(60), 60, rid="new", priority=50)
    rig.until_true(lambda: bool(preempted(rig)))
    assert preempted(rig) == [("large", "new")]
    rig.run()
    rig.check_empty()


def test_nobody_goes_if_that_would_not_admit_the_newcomer() -> None:
    """The room is with one that is not below it."""
    rig = Rig(tokens=200, **ON)
    start(rig, ("top", 90, 60, 90), ("small", 0, 8, 12))
    rig.submit(range(60), 60, rid="new", priority=50)
    rig.until_true(lambda: bool(rig.answers["small"].finals))
    assert preempted(rig) == [] and not rig.answers["new"].output_ids
    rig.run()
    rig.check_empty()


def test_a_running_slot_can_be_what_is_lacking() -> None:
    rig = Rig(tokens=1000, max_running_requests=2, **ON)
    start(rig, ("a", 0, 10, 60), ("b", 90, 10, 60))
    rig.submit(range(30), 20, rid="new", priority=50)
    rig.until_true(lambda: bool(rig.answers["new"].finals))
    assert preempted(rig) == [("a", "new")] and not rig.answers["b"].finals
    rig.run()
    rig.check_empty()


@LOOPS
def test_a_prompt_that_is_being_cut_makes_way(overlap: bool) -> None:
    """What was computed of it stays in the prefix cache, so it costs little."""
    rig = Rig(
        tokens=600, context_len=300, chunked_prefill_size=16, disable_overlap_schedule=not overlap, **ON
    )
    long = [(i * 7) % 97 for i in range(160)]
    rig.submit(long, 4, rid="long", priority=0, ignore_eos=True)
    rig.until_true(lambda: rig.state.chunked_req is not None and rig.state.chunked_req.prefix_len >= 32)
    rig.submit(range(10), 4, rid="new", priority=30, ignore_eos=True)
    rig.run()
    assert preempted(rig) == [("long", "new")] and rig.answers["new"].at[0] < rig.answers["long"].at[0]
    rig.check_empty()
    again = [body for body in rig.bodies(AdmitOk) if body.rid == "long" and body.need]
    assert len(again) == 2 and again[1].prefix >= 32
    calm = Rig(tokens=4000, context_len=300)
    calm.submit(long, 4, rid="long", ignore_eos=True)
    calm.run()
    assert calm.answers["long"].output_ids == rig.answers["long"].output_ids


def test_a_cut_prompt_that_leaves_room_for_the_newcomer_goes_on() -> None:
    rig = Rig(tokens=600, context_len=300, chunked_prefill_size=64, **ON)
    rig.submit([(i * 7) % 97 for i in range(80)], 4, rid="long", priority=0)
    rig.until_true(lambda: rig.state.chunked_req is not None)
    rig.submit(range(10), 4, rid="new", priority=30)
    rig.run()
    assert preempted(rig) == []


def test_who_is_about_to_end_is_left_alone() -> None:
    """It is being aborted, or its last token is under way: its room comes anyway."""
    rig = Rig(max_running_requests=1, disable_overlap_schedule=False, **ON)
    start(rig, ("runs", 0, 10, 40))
    rig.abort("runs")
    rig.submit(range(10), 4, rid="new", priority=50)
    rig.run()
    assert preempted(rig) == [] and rig.answers["runs"].reason == "abort"
    rig.submit(range(10), 2, rid="short", priority=0, ignore_eos=True)
    rig.until_true(lambda: "short" in rig.state.live and rig.state.live["short"].inflight == 2)
    rig.submit(range(10), 4, rid="newer", priority=50)
    rig.run()
    assert preempted(rig) == []
    rig.check_empty()


def test_what_is_left_over_is_not_for_one_below_the_victim() -> None:
    """The victim gives back much; a third one, lower than the victim, must not slip in before it."""
    rig = Rig(tokens=200, max_running_requests=4, **ON)
    start(rig, ("victim", 5, 90, 90))
    rig.submit(range(30), 20, rid="lower", priority=0)
    rig.until_true(lambda: any(req.rid == "lower" for req in rig.state.waiting_queue))
    rig.submit(range(50, 80), 30, rid="high", priority=40)
    rig.until_true(lambda: bool(preempted(rig)))
    assert preempted(rig) == [("victim", "high")]
    first = [body.rid for body in rig.bodies(AdmitOk)]
    rig.run()
    later = [body.rid for body in rig.bodies(AdmitOk)][len(first) :]
    assert "lower" not in first and later.index("victim") < later.index("lower")
    rig.check_empty()


def test_memory_that_runs_out_can_be_taken_from_the_lowest() -> None:
    """retraction_policy priority: the one with the most tokens goes, because it is the lowest."""
    for policy, gone in (("priority", "low"), ("length", "high")):
        rig = Rig(
            tokens=120,
            enable_priority_scheduling=True,
            disable_priority_preemption=True,
            retraction_policy=policy,
            schedule_conservativeness=0.001,
        )
        rig.submit(range(20), 60, rid="low", priority=0)
        rig.until_true(lambda rig=rig: len(rig.answers["low"].output_ids) >= 12)
        rig.submit(range(50, 70), 60, rid="high", priority=9)
        rig.until_true(lambda rig=rig: bool(rig.bodies(RequestRetracted)))
        assert rig.bodies(RequestRetracted)[0].rid == gone
        rig.run()
        rig.check_empty()


@pytest.mark.parametrize("seed", range(6))
def test_what_a_set_of_requests_would_give_back_is_exact(seed: int) -> None:
    """Shared prefixes count once nobody else holds them; checked against really letting go."""
    rng = random.Random(seed)
    rig = Rig(
        tokens=512,
        context_len=160,
        page_size=rng.choice((1, 4, 16)),
        eos_every=83,
        disable_radix_cache=seed == 5,
    )
    for number, step in enumerate(step for step in crowd(seed) if hasattr(step, "head")):
        submit(rig, step, f"r{number}")
        for _ in range(rng.randrange(4)):
            rig.stop()
    cache, holders = rig.state.cache, rig.holders()
    assert len(holders) >= 3
    chosen = rng.sample(holders, rng.randrange(2, len(holders) + 1))
    before, expected = cache.room(), cache.releasable(chosen)
    for req in chosen:
        cache.release(req, [], insert=False, why="abort")
    assert cache.room() - before == expected > 0


def plainly(
    adder: PrefillAdder, req: Req, match: Match, candidates: list[Req], least: int, fixed: int
) -> list[Req]:
    """What `fewest` finds, every set asked about as a whole."""
    if len(candidates) < least or not adder.would_take(req, match, candidates):
        return []
    sizes = range(least, len(candidates) + 1)
    chosen = list(candidates[: next(n for n in sizes if adder.would_take(req, match, candidates[:n]))])
    for spared in reversed(chosen[fixed:]):
        fewer = [victim for victim in chosen if victim is not spared]
        if len(fewer) >= least and adder.would_take(req, match, fewer):
            chosen = fewer
    return chosen


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tree", [True, False])
def test_the_fewest_are_those_of_the_plain_search(seed: int, tree: bool) -> None:
    rng = random.Random(seed)
    page_size = rng.choice((1, 4, 16))
    rig = Rig(tokens=512, context_len=160, page_size=page_size, disable_radix_cache=not tree)
    found, asked = 0, 0
    for number, step in enumerate(step for step in crowd(seed) if hasattr(step, "head")):
        submit(rig, step, f"r{number}")
        for _ in range(rng.randrange(6)):
            rig.stop()
        state = rig.state
        running, waiting = list(state.running_batch.reqs), list(state.waiting_queue)
        if len(running) < 2 or not waiting:
            continue
        for _ in range(6):
            rides = len(running) if rng.random() < 0.4 else 0
            adder = PrefillAdder(state.cache, state.limits, running, rng.random(), mixed_decode_tokens=rides)
            adder.total_offset += rng.randrange(300)
            if rng.random() < 0.5:
                adder.rem_chunk = rng.randrange(1, 40)
            req, least, fixed = rng.choice(waiting), rng.randrange(1, 3), rng.randrange(2)
            candidates = rng.sample(running, rng.randrange(1, len(running) + 1))
            match = state.cache.match(req.fill_ids(), req.namespace, req.max_prefix_len)
            with state.cache.held(match.node):
                wanted = plainly(adder, req, match, candidates, least, fixed)
                assert fewest(Supposition(adder, req, match), candidates, least, fixed) == wanted
            asked, found = asked + 1, found + (0 < len(wanted) < len(candidates))
    assert asked


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_as_close_as_floats_can_be_is_judged_as_the_adder_does(seed: int) -> None:
    """Tenths do not add up exactly, and in which order they are added matters."""
    rng = random.Random(seed)
    rig = Rig(tokens=2000, context_len=256)
    for number in range(9):
        rig.submit([number, *range(rng.randrange(3, 30))], 41 + number, rid=f"r{number}")
    rig.until_true(lambda: len(rig.state.running_batch.reqs) == 9)
    state, running = rig.state, list(rig.state.running_batch.reqs)
    req = running[0]
    match = state.cache.match([90], "", 0)
    for ratio in (0.1, 0.3, 0.7):
        candidates = rng.sample(running[1:], 8)
        for edge in range(1, 8):  # with so many gone, need and room are the same
            adder = PrefillAdder(state.cache, state.limits, running[1:], ratio)
            trial = PrefillAdder(state.cache, state.limits, running[1:], ratio)
            trial.forget(candidates[:edge])
            trial.supposed_room = state.cache.releasable(candidates[:edge])
            adder.total_offset += trial.rem_total - trial.need_of(req, match)
            wanted = plainly(adder, req, match, candidates, 1, 0)
            assert fewest(Supposition(adder, req, match), candidates, 1, 0) == wanted


def test_as_many_questions_as_running_requests_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is about one request more or less; what the plain search adds up grows with the square."""
    looked_at = 0

    def count(self: PrefillAdder, req: Req) -> float:
        nonlocal looked_at
        looked_at += 1
        return plain(self, req)

    plain = PrefillAdder._promised
    for many in (20, 40):
        rig = Rig(tokens=4000, max_running_requests=many, **ON)
        for number in range(many):
            rig.submit([number, 1, 2], 60, rid=f"r{number}", priority=0)
        rig.until_true(lambda rig=rig, many=many: len(rig.state.running_batch.reqs) == many)
        req, running = rig.state.running_batch.reqs[0], rig.state.running_batch.reqs[1:]
        adder = PrefillAdder(rig.state.cache, rig.state.limits, running, 0.5)
        adder.total_offset += adder.rem_total - 1  # all but the last few have to go
        match = rig.state.cache.match([90], "", 0)
        looked_at = 0
        with monkeypatch.context() as patch:
            patch.setattr(PrefillAdder, "_promised", count)
            assert fewest(Supposition(adder, req, match), running, 1, 0)
        assert looked_at <= 6 * many


@LOOPS
def test_a_victim_is_told_before_anything_is_taken_from_it(overlap: bool) -> None:
    rig = Rig(max_running_requests=1, disable_overlap_schedule=not overlap, **ON)
    start(rig, ("runs", 0, 10, 40))
    rig.submit(range(10), 5, rid="new", priority=20)
    rig.until_true(lambda: bool(preempted(rig)))
    bodies = [event.body for event in rig.ring.snapshot()]
    [told] = [i for i, body in enumerate(bodies) if isinstance(body, RequestRetracted)]
    [given] = [i for i, body in enumerate(bodies) if isinstance(body, RowReturned) and body.rid == "runs"]
    assert told < given
