"""Explanations cover a life to the nanosecond, and name the cause that the engine's own budgets show."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from random_runs import cases, run
from recording_checks import seamless
from timed_rig import TimedRig
from workload import Step, crowd

from sgviz.errors import NotFound
from sgviz.events.schema import (
    Event,
    OutputStreamed,
    QueueEntered,
    RequestAborted,
)
from sgviz.recording import Cause, Recording
from sgviz.recording.explanation import WAITS, plain_ms

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def spans(events: list[Event]) -> dict[str, tuple[int, int]]:
    """First and last stamp of each request that the scheduler took, read off its events by hand."""
    found: dict[str, tuple[int, int]] = {}
    for event in events:
        body = event.body
        if isinstance(body, QueueEntered) and not body.again:
            found[body.rid] = (body.received_ns, 0)
        elif isinstance(body, OutputStreamed):
            for rid, end in zip(body.rids, body.finished):
                if end:
                    found[rid] = (found[rid][0], event.t)
        elif isinstance(body, RequestAborted) and body.where in ("waiting", "chunk", "retract", "running"):
            found[body.rid] = (found[body.rid][0], max(found[body.rid][1], event.t))
    return found


def check(case: tuple[dict[str, object], list[Step]]) -> None:
    rig, _ = run(*case)
    rec = rig.recording()
    for rid, (start, end) in spans(rig.events()).items():
        explanation = rec.explain(rid)
        seamless(explanation)
        assert explanation.total_ns == end - start, rid
        assert explanation.unexplained_ns <= 0.01 * explanation.total_ns, (rid, explanation.text())
        assert explanation.done


@profile(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_random_lives_are_explained_to_the_nanosecond(case: tuple[dict[str, object], list[Step]]) -> None:
    check(case)


@pytest.mark.long
@profile(max_examples=2000, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_random_lives_are_explained_to_the_nanosecond_long(
    case: tuple[dict[str, object], list[Step]],
) -> None:
    check(case)


@pytest.mark.parametrize("overlap", [True, False])
def test_crowded_lives_are_explained(overlap: bool) -> None:
    config: dict[str, object] = {
        "tokens": 192,
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.001,
        "disable_overlap_schedule": not overlap,
    }
    check((config, crowd(3)))


# ---------------------------------------------------------------- the queue at a moment

LOOPS = pytest.mark.parametrize("overlap", [True, False])


@LOOPS
def test_why_not_running_says_the_same_for_the_whole_queue(overlap: bool) -> None:
    rig = TimedRig(tokens=200, disable_overlap_schedule=not overlap)
    rig.submit(range(80), 60, rid="big", ignore_eos=True)
    for _ in range(8):
        rig.stop()
    for number in range(5):
        rig.submit(range(10 * number, 10 * number + 30), 20, rid=f"w{number}")
    rig.run()
    rec = rig.recording()
    seen = 0
    for iteration in range(1, rec.at().iteration + 1):
        moment, why = rec.at(iteration=iteration), rec.why_not_running(iteration=iteration)
        assert tuple(why.rid) == moment.waiting and list(why.position) == list(range(len(why)))
        assert set(why.cause) <= {str(cause) for cause in WAITS}
        seen += len(why)
        if len(why) > 1 and why.cause.iloc[0] == "kv":
            assert set(why.cause.iloc[1:]) == {"head_of_line"} and why.blockers.iloc[1] == (why.rid.iloc[0],)
    assert seen


def test_text_names_request_causes_and_numbers() -> None:
    rig = TimedRig(tokens=200)
    rig.submit(range(80), 60, rid="big", ignore_eos=True)
    for _ in range(8):
        rig.stop()
    rig.submit(range(50, 90), 40, rid="waits")
    rig.run()
    text = rig.recording().explain("waits").text()
    assert text.startswith("waits took ") and "too few KV tokens" in text and "held by big (" in text
    assert str(rig.recording().explain("waits")) == text


def test_an_unknown_rid_is_refused_by_name() -> None:
    rig = TimedRig()
    rig.submit(range(8), 2, rid="abc")
    rig.run()
    with pytest.raises(NotFound, match="did you mean 'abc'"):
        rig.recording().explain("abd")


def test_a_part_of_a_rid_is_enough_when_it_is_one_s() -> None:
    rig = TimedRig()
    for rid in ("chat-17af", "chat-28bf"):
        rig.submit(range(8), 2, rid=rid)
    rig.run()
    rec = rig.recording()
    assert rec.explain("…17af").rid == rec.explain("7af").rid == rec.explain("chat-1").rid == "chat-17af"
    assert len(rec.events_of("28bf")) == len(rec.events_of("chat-28bf")) > 0
    for part in ("chat", "f"):
        with pytest.raises(NotFound, match="chat-17af, chat-28bf"):
            rec.request(part)


@pytest.mark.parametrize("wrong", [0, None, 1.5, "", "…"])
def test_what_names_no_request_is_not_found(wrong: object) -> None:
    rig = TimedRig()
    rig.submit(range(8), 2, rid="abc")
    rig.run()
    with pytest.raises(NotFound, match="no request"):
        rig.recording().journey(wrong)  # type: ignore[arg-type]


def test_times_are_written_without_an_exponent() -> None:
    assert [plain_ms(ns) for ns in (3_260_400_000, 12_340_000, 1_500_000, 12_000)] == [
        "3,260 ms", "12.3 ms", "1.50 ms", "0.012 ms"
    ]  # fmt: skip


def waits_of_parts(rec: Recording, rid: str) -> dict[Cause, int]:
    """What the explanation says of the stays in the queue, added up part by part."""
    sums: dict[Cause, int] = {}
    for stay in rec.explainer().standings.stays.get(rid, []):
        for part in rec.explain(rid).parts:
            inside = min(part.end_ns, stay.end or rec.t_end) - max(part.start_ns, stay.start)
            if inside > 0:
                sums[part.cause] = sums.get(part.cause, 0) + inside
    return sums


@profile(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_waits_added_up_quickly_are_those_of_the_parts(case: tuple[dict[str, object], list[Step]]) -> None:
    rec = run(*case)[0].recording()
    for rid in rec.rids:
        assert rec.explainer().queue_waits(rec.request(rid)) == waits_of_parts(rec, rid)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_waits_of_a_crowd_added_up_quickly_are_those_of_the_parts(policy: str) -> None:
    config: dict[str, object] = {"tokens": 192, "chunked_prefill_size": 16, "schedule_policy": policy}
    rec = run(config, crowd(5))[0].recording()
    found = {rid: rec.explainer().queue_waits(rec.request(rid)) for rid in rec.rids}
    assert found == {rid: waits_of_parts(rec, rid) for rid in rec.rids}
    assert {Cause.HEAD_OF_LINE, Cause.PLANNING} <= {cause for sums in found.values() for cause in sums}
