"""A pause is a cause of its own, its sums are exact, and what readers say of the engine stays true in it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from recording_checks import assert_books_balance, seamless
from test_pause import Hold, busy, go_on, holds, pause
from timed_rig import TimedRig
from true_state import Truth
from workload import CONTEXT, EOS_EVERY, VOCAB, Submit, settings, submit, submits

from sgviz.events.schema import (
    Event,
    GenerationContinued,
    GenerationPaused,
    RequestDispatched,
    RequestReceived,
    RequestTokenized,
)
from sgviz.recording import Cause, Recording
from sgviz.recording.moment import moment

MS = 1_000_000
LONG_NS = 70 * MS


def run(config: dict[str, object], first: list[Submit], paused: list[Hold]) -> tuple[TimedRig, list[Truth]]:
    """A workload with pauses on the timed rig, and the truth at every stop of a pause."""
    rig = TimedRig(context_len=CONTEXT, vocab_size=VOCAB, eos_every=EOS_EVERY, **config)
    truths = []
    for number, step in enumerate(first):
        submit(rig, step, f"r{number}")
    for number, hold in enumerate(paused):
        for _ in range(hold.before):
            rig.stop()
        pause(rig, hold.mode)
        for place, step in enumerate(hold.late):
            submit(rig, step, f"late{number}.{place}")
        for _ in range(hold.stops):
            rig.stop()
            truths.append(Truth.of(rig))
        rig.clock.advance(LONG_NS)
        go_on(rig)
    rig.run()
    return rig, truths


@profile(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(settings(), st.lists(submits, min_size=1, max_size=5), st.lists(holds, min_size=1, max_size=2))
def test_with_pauses_at_random_the_readers_are_right(
    config: dict[str, object], first: list[Submit], paused: list[Hold]
) -> None:
    rig, truths = run(config, first, paused)
    recording = rig.recording()
    assert_books_balance(recording)
    assert recording.check() == []
    for rid in recording.rids:
        seamless(recording.explain(rid))
    folded, events = recording.fold(), rig.events()
    for truth in truths:
        truth.compare(moment(folded.keyframes.after(events, truth.count), truth.count, events[0].t))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("normal", [False, True])
def test_who_waits_in_a_pause_waits_for_its_end(normal: bool, mode: str) -> None:
    rig = TimedRig(disable_overlap_schedule=normal)
    rig.submit(range(20), 30, rid="running")
    rig.until_true(lambda: len(rig.answers["running"].output_ids) > 5)
    pause(rig, mode)  # type: ignore[arg-type]
    rig.submit(range(40, 60), 3, rid="late")
    rig.stop(), rig.stop(), rig.stop()
    rig.clock.advance(LONG_NS)
    go_on(rig)
    rig.run()
    recording = rig.recording()
    for rid in ("running", "late"):
        sums = recording.explain(rid).by_cause()
        assert LONG_NS <= sums[Cause.PAUSED] < LONG_NS + 2 * MS, (rid, sums)
    [words] = {part.detail for part in recording.explain("late").parts if part.cause is Cause.PAUSED}
    assert words == f"generation is paused (mode {mode})"
    waits = recording.waits.set_index("rid")
    assert waits.paused_ms["late"] == pytest.approx(recording.explain("late").by_cause()[Cause.PAUSED] / MS)


def test_who_waits_in_a_pause_that_has_not_ended_is_told_so() -> None:
    rig = busy(True)
    pause(rig, "in_place")
    rig.submit([1, 2], rid="new")
    for _ in range(6):
        rig.stop()
    rig.abort("r1")  # an event, at which the recording ends
    rig.stop(), rig.stop(), rig.stop()
    recording = Recording(rig.ring.snapshot())
    assert Cause.PAUSED in recording.explain("new").by_cause()
    seamless(recording.explain("new"))


def test_before_the_scheduler_a_request_waits_at_the_closed_door() -> None:
    """From 10 to 30 ms the tokenizer manager holds new requests back; one came at 4 and was tokenized at 34."""

    def at(ms: float, component: str, seq: int, body: object) -> Event:
        return Event(seq, round(ms * MS), component, 0, body)  # type: ignore[arg-type]

    came = RequestReceived(
        rid="a", type="GenerateReqInput", path="/generate", stream=False, model="m", messages=0, chars=1
    )
    events = [
        at(4, "http", 1, came),
        at(10, "tokenizer_manager", 1, GenerationPaused(mode="abort", requests=0)),
        at(30, "tokenizer_manager", 2, GenerationContinued(mode="abort", since_ns=10 * MS)),
        at(34, "tokenizer_manager", 3, RequestTokenized(rid="a", prompt_tokens=1)),
        at(35, "tokenizer_manager", 4, RequestDispatched(rid="a")),
    ]
    explanation = Recording(events).explain("a")
    seamless(explanation)
    assert explanation.by_cause()[Cause.PAUSED] == 20 * MS
    assert explanation.total_ns == 31 * MS
