"""What a reader sees of requests for vectors: their way, their time without a hole, and the wait for the other kind."""

from __future__ import annotations

import pytest
from embedding_rig import EmbeddingRig
from recording_checks import assert_books_balance, assert_memory_adds_up, seamless
from timed_rig import TimedRig

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


def test_the_way_of_a_vector_names_the_types_that_carry_it() -> None:
    rig = Rig()
    vector, token = rig.embed(range(30)), rig.submit(range(30), 1)
    rig.run()
    rec = rig.recording()
    types = [step.type for step in rec.journey(vector)]
    assert types == ["Req", "ScheduleBatch", "EmbeddingBatchResult", "Pooler", "BatchEmbeddingOutput"]
    assert rec.journey(vector)[3].holds == {"embedding": "16 numbers"}
    assert "Pooler" not in [step.type for step in rec.journey(token)]
