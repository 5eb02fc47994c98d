"""Engine in one process: calls, streams, errors, two at once, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request

import pytest
from leftovers import assert_nothing_left, snapshot

import sgviz
from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, NotFound, StartupError, Unavailable

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
SMALL = {"torch_threads": 1, "max_total_tokens": 4096}


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine("tiny-llama", **SMALL) as running:
        yield running


def test_generate_gives_one_output_for_a_prompt_and_a_list_for_a_list(engine: Engine) -> None:
    one = engine.generate("hello", GREEDY)
    many = engine.generate(["hello", "world"], GREEDY)
    assert one["output_ids"] == many[0]["output_ids"]
    assert [out["index"] for out in many] == [0, 1]
    meta = one["meta_info"]
    assert meta["completion_tokens"] == 12 and meta["finish_reason"] == {"type": "length", "length": 12}
    assert sum(meta["time_stats"].values()) == pytest.approx(meta["e2e_latency"], abs=2e-6)


def test_streams_grow_to_the_whole_answer(engine: Engine) -> None:
    longer = {**GREEDY, "max_new_tokens": 200}  # on a busy machine several tokens come as one part
    whole = engine.generate("stream me", longer)
    parts = list(engine.stream_sync("stream me", longer))
    assert parts[-1]["text"] == whole["text"] and parts[-1]["output_ids"] == whole["output_ids"]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(parts))
    assert len(parts) > 4


def test_async_calls_work_in_a_running_loop(engine: Engine) -> None:
    async def use() -> tuple[dict, list[dict]]:
        whole, parts = await asyncio.gather(engine.async_generate("abc", GREEDY), _collect(engine, "abc"))
        return whole, parts

    whole, parts = asyncio.run(use())
    assert parts[-1]["output_ids"] == whole["output_ids"]


async def _collect(engine: Engine, prompt: str) -> list[dict]:
    return [part async for part in engine.stream(prompt, GREEDY)]


def test_a_stream_that_is_left_early_is_aborted(engine: Engine) -> None:
    stream = engine.stream_sync("leave", {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True})
    next(stream)
    stream.close()
    for _ in range(100):
        if engine.internal_state()["num_live_reqs"] == 0:
            break
    state = engine.internal_state()
    assert state["num_live_reqs"] == 0 and state["protected_tokens"] == state["private_tokens"] == 0


def test_chat_takes_the_openai_parameters_and_refuses_what_is_wrong(engine: Engine) -> None:
    reply = engine.chat("hi", max_tokens=5, temperature=0)
    assert reply.usage["completion_tokens"] <= 5 and str(reply) == reply.text
    assert engine.recording().request(reply.rid).stats.finished
    with pytest.raises(BadRequest, match="temperature"):
        engine.chat("hi", temperature=-1)
    with pytest.raises(NotFound, match="gpt-4"):
        engine.chat("hi", model="gpt-4")
    with pytest.raises(BadRequest, match="max_new_token"):
        engine.generate("hi", {"max_new_token": 3})
    with pytest.raises(BadRequest):
        engine.generate(input_ids=[5, 99999])


def test_a_live_recording_agrees_with_the_scheduler(engine: Engine) -> None:
    engine.generate(["a b c d"] * 5, GREEDY)
    recording = engine.recording()
    assert recording.check() == []
    state = engine.internal_state()
    last = engine.recording().kv.iloc[-1]
    assert last["free"] == state["available_tokens"] and last["evictable"] == state["evictable_tokens"]


def test_an_engine_serves_while_it_is_used(engine: Engine) -> None:
    server = engine.serve(port=0)
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        assert b"tiny-llama" in answer.read()
    with pytest.raises(StartupError, match=f"{server.port}"):
        engine.serve(port=server.port)
    server.stop()
    engine.generate("still here", GREEDY)


def test_two_engines_at_once_do_not_disturb_each_other() -> None:
    before = snapshot()
    with Engine("tiny-llama", **SMALL) as a, Engine("tiny-qwen2", event_loop="overlap", **SMALL) as b:
        one, two = a.generate("same prompt", GREEDY), b.generate("same prompt", GREEDY)
        assert one["output_ids"] != two["output_ids"]
        assert one["output_ids"] == a.generate("same prompt", GREEDY)["output_ids"]
        assert len(a.recording().rids) == 2 and len(b.recording().rids) == 1
    assert_nothing_left(before, more_files=4)


def test_nothing_is_left_of_a_closed_engine() -> None:
    with Engine("tiny-llama", **SMALL) as engine:  # imports and caches settle
        engine.generate("x", GREEDY)
    before = snapshot()
    with Engine("tiny-llama", **SMALL) as engine:
        engine.serve(port=0)
        engine.chat("x", max_tokens=3)
    engine.close()
    assert_nothing_left(before)
    with pytest.raises((Unavailable, RuntimeError)):
        engine.generate("after the end", GREEDY)


def test_a_start_that_fails_leaves_nothing(tmp_path: object) -> None:
    before = snapshot()
    with pytest.raises(StartupError, match="nonsense"):
        Engine(f"{tmp_path}/nonsense")
    with pytest.raises(ConfigError, match="page_size"):
        Engine("tiny-llama", page_sise=4)
    with pytest.raises(ConfigError, match="fcfs"):
        Engine("tiny-llama", schedule_policy="fcsf")
    with pytest.raises(ConfigError, match="threads"):
        Engine("tiny-llama", mode="fibres")
    with pytest.raises((StartupError, ConfigError)):
        Engine("tiny-llama", max_total_tokens=16, page_size=32)
    assert_nothing_left(before, more_files=2)


def test_the_mock_device_needs_no_weights() -> None:
    with sgviz.Engine("tiny-llama", device="mock") as engine:
        first = engine.generate("abc", GREEDY)["output_ids"]
        assert first == engine.generate("abc", GREEDY)["output_ids"] and len(first) == 12
