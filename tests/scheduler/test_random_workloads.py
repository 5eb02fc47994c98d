"""Whatever clients do, however small the pool: every answer is right, ends once, and nothing is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from fairness import Fairness
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from rig import Rig
from watch import FoldWatch
from workload import (
    CONTEXT,
    EOS_EVERY,
    VOCAB,
    Abort,
    Flush,
    Run,
    Step,
    Submit,
    crowd,
    most_turns,
    settings,
    steps,
    submit,
    unpressed,
)

from sgviz.events.schema import AdmitRefused, RequestAborted, RequestRetracted, TreeEvicted
from sgviz.messages import FlushCacheReqInput
from sgviz.scheduler.stops import Stop

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@dataclass
class Pressed:
    """A run under pressure, audited and folded at every stop."""

    rig: Rig
    watch: FoldWatch
    requests: dict[str, Submit] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    turns: int = 0
    fairness: Fairness = field(init=False)

    def __post_init__(self) -> None:
        self.fairness = Fairness(self.rig)

    def take(self, step: Step) -> None:
        match step:
            case Submit():
                rid = f"r{len(self.requests)}"
                self.requests[rid] = step
                submit(self.rig, step, rid)
            case Abort(which) if which < len(self.requests):
                rid = f"r{len(self.requests) - 1 - which}"
                self.aborted.add(rid)
                self.rig.abort(rid)
            case Run(stops):
                for _ in range(stops):
                    self.stop()
            case Flush():
                self.rig.inbox.send(FlushCacheReqInput(id="f"))

    def stop(self) -> Stop:
        stop = self.rig.stop()
        self.turns += stop is Stop.RECEIVED
        self.rig.check()
        self.watch.compare()
        if stop is Stop.PLANNED:
            self.fairness.look()
        return stop

    def finish(self) -> None:
        """Run until idle, in bounded turns."""
        state = self.rig.state
        while not (self.stop() is Stop.IDLE and state.is_fully_idle and not self.rig.inbox.messages):
            if self.turns % 1000 == 0:
                assert self.turns <= self.most_turns(), f"stuck after {self.turns} turns: {list(state.live)}"

    def most_turns(self) -> int:
        return self.turns_before + 2 + most_turns(self.requests, len(self.rig.bodies(RequestRetracted)))

    turns_before: int = 0


def press(config: dict[str, object], todo: list[Step]) -> Pressed:
    rig = Rig(context_len=CONTEXT, vocab_size=VOCAB, eos_every=EOS_EVERY, **config)
    run = Pressed(rig, FoldWatch(rig))
    for step in todo:
        run.take(step)
    run.turns_before = run.turns
    run.finish()
    return run


def compare(run: Pressed) -> None:
    """Every answer is that of the unpressed run; an aborted one may be cut anywhere."""
    wanted = unpressed(run.requests).answers
    for rid, step in run.requests.items():
        answer, right = run.rig.answers[rid], wanted[rid]
        got = len(answer.output_ids)
        assert answer.output_ids == right.output_ids[:got], rid
        assert answer.logprobs == right.logprobs[:got], rid
        if not answer.cut:
            assert answer.decode_ids == step.ids[-5:] + answer.output_ids, rid
        if rid in run.aborted and answer.reason == "abort":
            assert answer.status is None, rid
        else:
            assert answer.finish == right.finish and got == len(right.output_ids), rid


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, object], list[Step]]:
    return draw(settings()), draw(steps)


def check_case(case: tuple[dict[str, object], list[Step]]) -> None:
    run = press(*case)
    assert run.turns <= run.most_turns()
    run.rig.check_empty()
    compare(run)


@profile(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_every_answer_is_right_under_pressure(case: tuple[dict[str, object], list[Step]]) -> None:
    check_case(case)


@pytest.mark.long
@profile(max_examples=3000, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_every_answer_is_right_under_pressure_long(case: tuple[dict[str, object], list[Step]]) -> None:
    check_case(case)


@profile(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(settings(), st.integers(0, 10**6))
def test_every_answer_is_right_in_a_crowd(config: dict[str, object], seed: int) -> None:
    check_case((config, crowd(seed)))


@pytest.mark.long
@profile(max_examples=1000, deadline=None, suppress_health_check=SLOW)
@given(settings(), st.integers(0, 10**6))
def test_every_answer_is_right_in_a_crowd_long(config: dict[str, object], seed: int) -> None:
    check_case((config, crowd(seed, size=40)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_crowd_presses(overlap: bool, page_size: int) -> None:
    """The workloads above would prove little if memory never ran out."""
    kinds: Counter[type] = Counter()
    for seed in range(3):
        config = {
            "tokens": 192,
            "page_size": page_size,
            "schedule_conservativeness": 0.001,
            "disable_overlap_schedule": not overlap,
        }
        run = press(config, crowd(seed))
        run.rig.check_empty()
        compare(run)
        kinds.update(type(event.body) for event in run.rig.ring.snapshot())
    assert kinds[RequestRetracted] >= 1 and kinds[TreeEvicted] >= 10
    assert kinds[AdmitRefused] >= 10 and kinds[RequestAborted] >= 3


@pytest.mark.parametrize("overlap", [False, True])
def test_the_crowd_makes_way(overlap: bool) -> None:
    """The same, for priorities: they would prove little if nobody ever had to go back to the queue."""
    preempted = 0
    for seed in range(4):
        config = {
            "tokens": 256,
            "chunked_prefill_size": (64, 16)[seed % 2],
            "max_running_requests": (None, 3)[seed % 2],
            "disable_overlap_schedule": not overlap,
            "enable_priority_scheduling": True,
            "retraction_policy": ("length", "priority")[seed % 2],
        }
        run = press(config, crowd(seed))
        run.rig.check_empty()
        compare(run)
        preempted += sum(bool(body.preempted_by) for body in run.rig.bodies(RequestRetracted))
    assert preempted >= 4
