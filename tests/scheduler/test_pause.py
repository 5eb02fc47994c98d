"""A pause, whenever it comes and however it is ended, changes no answer; what it holds can be asked about and ended."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from rig import Rig
from workload import CONTEXT, EOS_EVERY, VOCAB, Submit, settings, submit, submits

from sgviz.events import TimeStats
from sgviz.events.schema import GenerationContinued, GenerationPaused, RequestRetracted, RowReturned
from sgviz.messages import HealthCheckOutput, SamplingParams, TokenizedGenerateReqInput
from sgviz.messages.flow import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
)
from sgviz.messages.rids import HEALTH_CHECK_PREFIX
from sgviz.scheduler.stops import Stop

LOOPS = [False, True]
MODES: list[PauseMode] = ["in_place", "retract"]
both = pytest.mark.parametrize("mode", MODES)
loops = pytest.mark.parametrize("normal", LOOPS, ids=["overlap", "normal"])


@dataclass(frozen=True)
class Hold:
    """After `before` stops a pause, of `stops` stops, in which `late` requests come."""

    before: int
    mode: PauseMode
    stops: int
    late: tuple[Submit, ...]


holds = st.builds(
    Hold,
    before=st.integers(0, 40),
    mode=st.sampled_from(MODES),
    stops=st.integers(1, 12),
    late=st.lists(submits, max_size=2).map(tuple),
)


def pause(rig: Rig, mode: PauseMode) -> PauseGenerationReqOutput:
    """Ask for it, and go on until it is answered."""
    rig.inbox.send(PauseGenerationReqInput(id="p", mode=mode))
    answered = [len(rig.replies)]
    rig.until_true(lambda: len(rig.replies) > answered[0])
    reply = rig.replies.pop()
    assert isinstance(reply, PauseGenerationReqOutput) and reply.id == "p" and reply.success
    return reply


def go_on(rig: Rig) -> None:
    rig.inbox.send(ContinueGenerationReqInput(id="c"))
    rig.until(Stop.RECEIVED)
    reply = rig.replies.pop()
    assert isinstance(reply, ControlReqOutput) and reply.id == "c" and reply.success


def run(config: dict[str, object], first: list[Submit], paused: list[Hold], *, really: bool) -> Rig:
    """The workload with its pauses, or with the time they take and nothing else."""
    rig = Rig(context_len=CONTEXT, vocab_size=VOCAB, eos_every=EOS_EVERY, **config)
    for number, step in enumerate(first):
        submit(rig, step, f"r{number}")
    for number, hold in enumerate(paused):
        for _ in range(hold.before):
            rig.stop()
        if really:
            pause(rig, hold.mode)
        forwards = rig.state.forward_ct
        for place, step in enumerate(hold.late):
            submit(rig, step, f"late{number}.{place}")
        for _ in range(hold.stops):
            rig.stop()
            assert not really or rig.state.forward_ct == forwards
        if really:
            rig.check()
            go_on(rig)
    rig.run()
    rig.check_empty()
    return rig


@profile(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(settings(), st.lists(submits, min_size=1, max_size=6), st.lists(holds, min_size=1, max_size=3))
def test_answers_are_those_of_an_uninterrupted_run(
    config: dict[str, object], first: list[Submit], paused: list[Hold]
) -> None:
    held, free = (run(config, first, paused, really=really) for really in (True, False))
    assert held.answers.keys() == free.answers.keys()
    for rid, answer in free.answers.items():
        other = held.answers[rid]
        assert (other.output_ids, other.finish) == (answer.output_ids, answer.finish), rid
        assert other.logprobs == answer.logprobs


def busy(normal: bool, **config: object) -> Rig:
    """Six requests, some of them decoding and one with its prompt cut."""
    rig = Rig(disable_overlap_schedule=normal, chunked_prefill_size=16, **config)
    for number in range(5):
        rig.submit(range(number, number + 6), 40, rid=f"r{number}")
    rig.submit(range(80), 5, rid="long")
    rig.until_true(lambda: rig.state.chunked_req is not None and rig.state.num_running == 5)
    return rig


@both
@loops
def test_nothing_runs_and_everybody_is_counted(normal: bool, mode: PauseMode) -> None:
    rig = busy(normal)
    assert pause(rig, mode).requests == 6
    forwards = rig.state.forward_ct
    rig.submit([1, 2, 3], rid="new")
    for _ in range(8):
        rig.stop()
    assert rig.state.forward_ct == forwards and rig.state.pending_results == 0
    rig.inbox.send(GetLoadsReqInput(id="l"))
    rig.until(Stop.RECEIVED)
    reply = rig.replies.pop()
    assert isinstance(reply, GetLoadsReqOutput) and reply.load.paused == 7
    waiting = 7 if mode == "retract" else 1
    assert (reply.load.num_waiting_reqs, reply.load.num_running_reqs) == (waiting, 7 - waiting)
    assert (reply.load.num_used_tokens == 0) == (mode == "retract")
    go_on(rig)
    rig.run()
    rig.check_empty()


@loops
def test_a_flush_is_refused_while_paused_requests_hold_kv_and_done_when_none_does(normal: bool) -> None:
    rig = busy(normal)
    pause(rig, "in_place")
    refused = rig.flush()
    assert not refused.success and "0 requests wait and 6 run" in refused.message
    pause(rig, "retract")  # another mode takes over
    assert rig.flush().success
    assert rig.state.cache.ledger().free == rig.state.cache.total
    go_on(rig)
    rig.run()
    rig.check_empty()
    assert all(answer.reason == "length" for answer in rig.answers.values())


@both
@loops
def test_aborts_in_a_pause_end_at_once(normal: bool, mode: PauseMode) -> None:
    rig = busy(normal)
    pause(rig, mode)
    said = len(rig.answers["r1"].output_ids)
    for rid in ("r1", "long"):
        rig.abort(rid)
    rig.until_true(lambda: all(rig.answers[rid].finals for rid in ("r1", "long")), most=6)
    assert rig.answers["r1"].reason == "abort" and len(rig.answers["r1"].output_ids) >= said
    rig.check()
    rig.abort(abort_all=True)
    rig.until_true(lambda: rig.state.is_fully_idle, most=6)
    rig.check_empty()
    go_on(rig)
    assert rig.submit([5, 6], 3, rid="after") and rig.run()
    assert rig.answers["after"].reason == "length"


@both
@loops
def test_a_watchdog_sees_a_pause_and_not_a_stuck_loop(normal: bool, mode: PauseMode) -> None:
    rig = busy(normal)
    assert rig.scheduler.progress()[1]
    pause(rig, mode)
    assert not rig.scheduler.progress()[1]
    go_on(rig)
    assert rig.scheduler.progress()[1]


@both
def test_health_probes_are_answered_whether_or_not_anything_is_held(mode: PauseMode) -> None:
    for rig in (busy(True), Rig()):
        pause(rig, mode)
        probe = TokenizedGenerateReqInput(
            rid=f"{HEALTH_CHECK_PREFIX}1", input_ids=[0], sampling_params=SamplingParams().normalize(), stream=False,
            time_stats=TimeStats(),
        )  # fmt: skip
        rig.inbox.send(probe)
        rig.until_true(lambda rig=rig: bool(rig.replies), most=8)
        assert [type(reply) for reply in rig.replies] == [HealthCheckOutput]


@loops
def test_a_pause_is_told_with_its_beginning_and_who_gave_up_what(normal: bool) -> None:
    rig = busy(normal)
    pause(rig, "retract")
    go_on(rig)
    rig.run()
    [begun], [ended] = rig.bodies(GenerationPaused), rig.bodies(GenerationContinued)
    assert (begun.mode, begun.requests, ended.mode) == ("retract", 6, "retract")
    began_at = next(event.t for event in rig.ring.snapshot() if event.body is begun)
    assert ended.since_ns == began_at
    retracted = rig.bodies(RequestRetracted)
    assert {body.rid for body in retracted if body.paused} == set(rig.answers)
    assert all(answer.retractions == 1 for answer in rig.answers.values())


def test_asked_again_or_ended_without_a_pause_nothing_changes() -> None:
    rig = busy(True)
    go_on(rig)
    pause(rig, "in_place")
    pause(rig, "in_place")
    assert len(rig.bodies(GenerationPaused)) == 1
    go_on(rig)
    go_on(rig)
    assert len(rig.bodies(GenerationContinued)) == 1
    rig.run()
    rig.check_empty()


def test_a_pause_that_is_overtaken_before_it_rests_is_not_called_a_pause() -> None:
    rig = busy(False)
    rig.until_true(lambda: rig.state.pending_results > 0)
    rig.inbox.send(PauseGenerationReqInput(id="p", mode="in_place"))
    rig.inbox.send(ContinueGenerationReqInput(id="c"))
    rig.until_true(lambda: len(rig.replies) == 2)
    overtaken, continued = rig.replies
    assert isinstance(overtaken, PauseGenerationReqOutput) and isinstance(continued, ControlReqOutput)
    assert (overtaken.id, overtaken.success, overtaken.requests) == ("p", False, 0)
    assert "continued before" in overtaken.message and continued.success
    rig.replies.clear()
    rig.run()
    rig.check_empty()


@loops
def test_who_goes_back_is_told_before_anything_is_taken_from_it(normal: bool) -> None:
    rig = busy(normal)
    pause(rig, "retract")
    bodies = [event.body for event in rig.ring.snapshot()]
    for rid in rig.answers:
        [told] = [
            i for i, body in enumerate(bodies) if isinstance(body, RequestRetracted) and body.rid == rid
        ]
        [given] = [i for i, body in enumerate(bodies) if isinstance(body, RowReturned) and body.rid == rid]
        assert told < given
