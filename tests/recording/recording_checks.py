"""What must hold for every recording, synthetic or real. Each raises AssertionError with the facts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from sgviz.events.time_stats import STAGES, end_to_end_ns
from sgviz.recording import Explanation, Recording

TYPES = (
    "ChatCompletionRequest", "GenerateReqInput", "TokenizedGenerateReqInput", "Req", "ScheduleBatch",
    "GenerationBatchResult", "BatchTokenIDOutput", "BatchStrOutput", "SSE chunk",
)  # fmt: skip


def assert_memory_adds_up(rec: Recording) -> None:
    """free + evictable + protected + private == total after every event, none negative, fold == stated."""
    kv = rec.kv
    assert len(kv)
    assert (kv.free + kv.evictable + kv.protected + kv.private == kv.total).all()
    assert (kv[["free", "evictable", "protected", "private"]] >= 0).all().all()
    assert rec.check() == []


def assert_idle_memory(rec: Recording) -> None:
    """After the last request nothing is locked or private, and the tree's nodes are what is evictable."""
    ledger = rec.fold().state.ledger
    assert ledger.private == {} and ledger.protected == 0, (ledger.private, ledger.protected)
    assert sum(node.tokens for node in ledger.nodes.values()) == ledger.evictable
    assert ledger.free + ledger.evictable == ledger.total


def assert_requests_consistent(rec: Recording) -> None:
    """Stages and phases lie end to end; latencies are ordered; sampled tokens match the final count."""
    for row in rec.requests.to_dict("records"):
        request = rec.request(row["rid"])
        stages = rec.stages(row["rid"])
        for before, after in itertools.pairwise(stages):
            assert before.start_ns + before.duration_ns == after.start_ns
        assert sum(stage.duration_ns for stage in stages) == end_to_end_ns(request.stats)
        listed = [row[f"{name}_ms"] for _, name in STAGES]
        assert math.isclose(sum(ms for ms in listed if not math.isnan(ms)), row["total_ms"], abs_tol=1e-6)
        for phase, after in zip(request.phases, request.phases[1:]):
            assert phase.start <= phase.end == after.start, (row["rid"], request.phases)
        if row["finish_reason"] in ("stop", "length"):
            assert 0 < row["e2e_ms"] <= row["total_ms"] + 1e-9, row
            assert row["queue_ms"] >= 0 and row["n_batches"] >= 1
            assert request.sampled >= row["completion_tokens"]
        if row["finish_reason"] in ("stop", "length") and row["completion_tokens"]:
            assert 0 < row["ttft_ms"] <= row["e2e_ms"], row


def assert_batches_consistent(rec: Recording) -> None:
    """Members add up to iterations; the stamps of a batch are in order; every kept token has its batch."""
    iterations, members = rec.iterations, rec.batches
    by_bid = members.groupby("bid").agg(new=("extend_len", "sum"), size=("rid", "count"))
    for row in iterations.to_dict("records"):
        assert row["new_tokens"] == by_bid.new[row["bid"]] and row["batch_size"] == by_bid["size"][row["bid"]]
        assert row["kv_private"] >= 0
        if not math.isnan(row["forward_ms"]):  # a device that tells its parts
            assert math.isclose(row["forward_ms"] + row["sample_ms"], row["device_ms"], abs_tol=1e-9)
            assert row["copy_ms"] >= 0 and row["forward_ms"] > 0
        # the device may be done before the host has told that it launched: two lines, not one
        for line in (
            ("planned", "launched", "finished", "processed"),
            ("planned", "start", "end", "finished"),
        ):
            stamps = [row[f"{name}_ms"] for name in line if not math.isnan(row[f"{name}_ms"])]
            assert stamps == sorted(stamps), row
    sampled = sum(rec.request(rid).sampled for rid in rec.rids)
    assert int(members.token.notna().sum()) == sampled


def assert_journey_complete(rec: Recording, rid: str, types: Sequence[str] = TYPES) -> None:
    """All nine types, in order of time, each with facts; an answer that is not streamed ends as one body."""
    steps = rec.journey(rid)
    last = "response body" if steps[-1].holds["part"] == "body" else types[-1]
    assert tuple(step.type for step in steps) == (*types[:-1], last)
    times = [step.t_ms for step in steps]
    assert times == sorted(times) and times[0] == 0.0
    assert all(step.holds and all(isinstance(text, str) for text in step.holds.values()) for step in steps)


def assert_books_balance(rec: Recording) -> None:
    """Every slot, row, lock and end is accounted for."""
    report = rec.audit()
    assert report.balanced, str(report)


def assert_recording_sound(rec: Recording) -> None:
    """Everything at once."""
    assert_books_balance(rec)
    assert_memory_adds_up(rec)
    assert_requests_consistent(rec)
    assert_batches_consistent(rec)


def seamless(explanation: Explanation) -> None:
    """Parts lie end to end, none is empty, and they add up."""
    for part, after in itertools.pairwise(explanation.parts):
        assert part.end_ns == after.start_ns
    assert all(part.duration_ns > 0 for part in explanation.parts)
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
    stretches = explanation.stretches()
    assert sum(part.duration_ns for part in stretches) == explanation.total_ns
    assert all(part.end_ns == after.start_ns for part, after in itertools.pairwise(stretches))
