"""The same checks on recordings of the real pipeline (mock device): the fold is the engine's own memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from recording_checks import (
    assert_idle_memory,
    assert_journey_complete,
    assert_recording_sound,
)

import sgviz
from sgviz.recording.overlap_account import overlap_account

pytestmark = pytest.mark.slow
LOOPS = ("normal", "overlap")


@pytest.mark.parametrize(("mode", "loop"), [*itertools.product(("threads", "processes"), LOOPS)])
def test_a_real_run_has_a_sound_recording(mode: str, loop: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sgv"
    with sgviz.Engine(mode=mode, device="mock", event_loop=loop, mock_step_ms=1, record=str(path)) as engine:  # type: ignore[arg-type]
        prompts = [f"hello world number {number} " * (3 + number % 7) for number in range(12)]
        engine.generate(prompts, sampling_params={"max_new_tokens": 20})
        reply = engine.chat("hi there", max_tokens=8)
    rec = sgviz.load(path)
    assert_recording_sound(rec)
    assert_idle_memory(rec)
    assert_journey_complete(rec, reply.rid)
    assert rec.dropped == 0 and rec.truncated == 0 and rec.missing == {} and rec.unknown == {}
    assert len({step.pid for step in rec.journey(reply.rid)}) == (3 if mode == "processes" else 1)


@pytest.mark.parametrize(("loop", "page"), [("normal", 4), ("overlap", 1), ("overlap", 16)])
def test_memory_adds_up_under_pressure(loop: str, page: int) -> None:
    """A pool far too small: chunks, evictions, samples of one prompt, an abort and a flush."""
    options = {"page_size": page, "max_total_tokens": 512, "chunked_prefill_size": 64, "mock_step_ms": 0}
    with sgviz.Engine(device="mock", event_loop=loop, **options) as engine:  # type: ignore[arg-type]
        prompts = [f"hello world number {number} " * (3 + number) for number in range(24)]
        engine.generate(prompts, sampling_params={"max_new_tokens": 60})
        reply = engine.chat("hi there", max_tokens=8, n=3)
        next(iter(engine.stream_sync("tell me", {"max_new_tokens": 50})))
        rec = engine.recording().freeze()
        assert_recording_sound(rec)
        assert {"tree.evicted", "chunk.cut"} <= set(rec.events.kind)
        assert len(rec.request(reply.rid).children) >= 3
        while not engine.flush_cache():
            pass
        assert_idle_memory(engine.recording())
        assert engine.recording().fold().state.ledger.evictable == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_real_device_tells_forward_sampling_and_copy(loop: str) -> None:
    with sgviz.Engine("tiny-llama", device="cpu", event_loop=loop, max_total_tokens=1024) as engine:  # type: ignore[arg-type]
        prompts = [[5 + number] * (3 + number) for number in range(4)]
        engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 6})
        rec = engine.recording().freeze()
    assert_recording_sound(rec)
    table = rec.iterations
    assert table[["forward_ms", "sample_ms", "copy_ms"]].notna().all().all()
    account = overlap_account(rec.stamped())
    assert len(account.copies) == len(table) and {span.stage for span in account.device} >= {
        "decode",
        "sample",
    }
    busy = sum(span.end - span.start for span in account.device) / 1e6
    assert busy == pytest.approx(table.device_ms.sum())
