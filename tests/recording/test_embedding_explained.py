"""What a reader sees of requests for vectors: their way, their time without a hole, and the wait for the other kind."""

from __future__ import annotations

import random

import pytest
from embedding_rig import EmbeddingRig
from recording_checks import assert_books_balance, assert_memory_adds_up, seamless
from timed_rig import TimedRig

from sgviz.events import Reason
from sgviz.events.schema import ScanStopped
from sgviz.recording import Cause

LOOPS = pytest.mark.parametrize("disable_overlap_schedule", [True, False], ids=["normal", "overlap"])


class Rig(EmbeddingRig, TimedRig):
    """Requests for vectors on a device that takes its time."""


@LOOPS
def test_every_nanosecond_of_a_request_for_a_vector_is_explained(disable_overlap_schedule: bool) -> None:
    rig = Rig(disable_overlap_schedule=disable_overlap_schedule, chunked_prefill_size=16)
    for number in range(6):
        rig.embed(range(number, 30 + number))
        rig.submit(range(40 + number, 60), 3)
        rig.stop()
    rig.run()
    rec = rig.recording()
    assert_books_balance(rec)
    assert_memory_adds_up(rec)
    for rid in rec.rids:
        explanation = rec.explain(rid)
        seamless(explanation)
        assert explanation.unexplained_ns == 0 and explanation.total_ns > 0
        assert rid.startswith("r") or Cause.DECODE not in {part.cause for part in explanation.parts}


@LOOPS
def test_who_waits_for_the_other_kind_of_batch_is_told_so(disable_overlap_schedule: bool) -> None:
    rig = Rig(disable_overlap_schedule=disable_overlap_schedule)
    tokens, vector = rig.submit(range(40), 2), rig.embed(range(3, 40))
    behind = rig.embed(range(7, 40))
    rig.run()
    rec = rig.recording()
    part = next(part for part in rec.explain(vector).parts if part.cause is Cause.OTHER_KIND)
    assert part.duration_ns > 0 and part.blockers == (tokens,) and "of the other kind" in part.detail
    assert Cause.HEAD_OF_LINE in {part.cause for part in rec.explain(behind).parts}
    assert Cause.OTHER_KIND not in {part.cause for part in rec.explain(tokens).parts}


@LOOPS
def test_who_is_passed_over_and_who_does_not_fit_have_their_own_reasons(
    disable_overlap_schedule: bool,
) -> None:
    rig = Rig(tokens=128, disable_overlap_schedule=disable_overlap_schedule)
    tokens = rig.submit(range(20), 20)
    vector, second = rig.embed(range(30, 40)), rig.embed(range(31, 41))
    big = rig.submit(range(40, 90), 60)
    behind = rig.submit(range(5), 2)
    rig.run()
    rec = rig.recording()
    parts = {rid: {part.cause: part for part in rec.explain(rid).parts} for rid in rec.rids}
    assert parts[vector][Cause.OTHER_KIND].blockers == (tokens,)
    assert Cause.HEAD_OF_LINE not in parts[vector] and Cause.KV not in parts[vector]
    assert parts[second][Cause.HEAD_OF_LINE].blockers == (vector,)
    assert Cause.KV in parts[big] and parts[behind][Cause.HEAD_OF_LINE].blockers == (big,)
    for rid in rec.rids:
        seamless(rec.explain(rid))
    told = rec.decisions
    passed = told[(told.rid == vector) & (told.verdict == "not tried")]
    assert list(passed.reason) == ["other_kind"]


@LOOPS
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("seed", range(4))
def test_waits_of_both_kinds_added_up_quickly_are_those_of_the_parts(
    seed: int, policy: str, disable_overlap_schedule: bool
) -> None:
    draw = random.Random(seed)
    rig = Rig(
        tokens=160, chunked_prefill_size=draw.choice([-1, 16]), schedule_policy=policy,
        disable_overlap_schedule=disable_overlap_schedule, max_running_requests=draw.choice([2, 8]),
    )  # fmt: skip
    for number in range(24):
        ids = [*range(draw.randrange(30)), number]
        if draw.random() < 0.5:
            rig.embed(ids)
        else:
            rig.submit(ids, draw.randrange(1, 30))
        for _ in range(draw.randrange(3)):
            rig.stop()
    rig.run()
    rec = rig.recording()
    passed = [body for body in rig.bodies(ScanStopped) if body.passed or body.reason is Reason.OTHER_KIND]
    assert passed
    for rid in rec.rids:
        explanation = rec.explain(rid)
        seamless(explanation)
        assert explanation.unexplained_ns == 0
        sums: dict[Cause, int] = {}
        for stay in rec.explainer().standings.stays[rid]:
            for part in explanation.parts:
                inside = min(part.end_ns, stay.end) - max(part.start_ns, stay.start)
                if inside > 0:
                    sums[part.cause] = sums.get(part.cause, 0) + inside
        assert rec.explainer().queue_waits(rec.request(rid)) == sums


def test_the_way_of_a_vector_names_the_types_that_carry_it() -> None:
    rig = Rig()
    vector, token = rig.embed(range(30)), rig.submit(range(30), 1)
    rig.run()
    rec = rig.recording()
    types = [step.type for step in rec.journey(vector)]
    assert types == ["Req", "ScheduleBatch", "EmbeddingBatchResult", "Pooler", "BatchEmbeddingOutput"]
    assert rec.journey(vector)[3].holds == {"embedding": "16 numbers"}
    assert "Pooler" not in [step.type for step in rec.journey(token)]
