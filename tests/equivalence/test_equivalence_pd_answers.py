"""What an answer of a prefill/decode pair may hold beside greedy ids: equal to a single engine's in all of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pair_engines import EnginePair, Output, engine_pair

from sgviz.engine import Engine

MODEL = "tiny-llama"
SIDES = {
    "plain": ({}, {}),
    "radix, page 16": (
        {"page_size": 16},
        {"page_size": 16, "disaggregation_decode_enable_radix_cache": True},
    ),
}
JSON = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]})


def drawn(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 256) for _ in range(length)]


@pytest.fixture(scope="module")
def single() -> Iterator[Engine]:
    with Engine(MODEL, torch_threads=1, max_total_tokens=8192, chunked_prefill_size=64) as engine:
        yield engine


@pytest.fixture(scope="module", params=SIDES)
def pair(request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    prefill, decode = SIDES[request.param]
    with engine_pair(
        MODEL, prefill={"chunked_prefill_size": 64, **prefill}, decode=decode, disaggregation_checksum=True
    ) as both:
        yield both
        both.check_books()
        both.check_idle()


def essence(output: Output) -> dict[str, Any]:
    """What must be equal."""
    meta = output["meta_info"]
    return {
        "text": output["text"],
        "ids": output["output_ids"],
        "finish": meta["finish_reason"],
        "prompt": meta["prompt_tokens"],
        "completion": meta["completion_tokens"],
    }


def same_column(one: list[Any], two: list[Any]) -> None:
    """Equal ids and texts, and values as near as two batches of another shape come."""
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert (a is None) is (b is None)
        if isinstance(a, list):
            same_column(a, b)
        elif a is not None:
            assert a[1:] == b[1:] and a[0] == (None if b[0] is None else pytest.approx(b[0], abs=1e-4))


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 24, "ignore_eos": True},
        {"max_new_tokens": 24, "min_new_tokens": 8},
        {"max_new_tokens": 24, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"max_new_tokens": 24, "json_schema": JSON},
        {"max_new_tokens": 24, "regex": "(ab|cd)+"},
        {"max_new_tokens": 24, "temperature": 0.9, "sampling_seed": 5},
        {
            "max_new_tokens": 24,
            "temperature": 1.3,
            "top_p": 0.8,
            "top_k": 30,
            "min_p": 0.01,
            "sampling_seed": 11,
        },
        {"max_new_tokens": 24, "logit_bias": {"70": 9.0, "71": 8.5}},
    ],
    ids=json.dumps,
)
def test_the_answer_is_that_of_one(single: Engine, pair: EnginePair, params: dict[str, Any]) -> None:
    asked = [drawn(1, 1), drawn(2, 17), drawn(3, 16), drawn(4, 150), drawn(4, 150)[:130] + drawn(5, 20)]
    params = {"temperature": 0.0, **params}
    wanted = single.generate(input_ids=asked, sampling_params=params)
    for _ in range(2):  # the second time from the caches
        assert list(map(essence, pair.generate(asked, params))) == list(map(essence, wanted))


def test_a_stop_at_the_first_token_and_later(single: Engine, pair: EnginePair) -> None:
    ids = drawn(6, 40)
    free = single.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 16})
    for at in (0, 1, 9):
        for stop in ({"stop_token_ids": [free["output_ids"][at]]}, {"stop": [free["text"][at : at + 2]]}):
            params = {"temperature": 0, "max_new_tokens": 16, **stop}
            wanted = essence(single.generate(input_ids=ids, sampling_params=params))
            assert essence(pair.one(ids, params)) == wanted
    stopped = {"temperature": 0, "max_new_tokens": 16, "stop_token_ids": [free["output_ids"][0]]}
    assert pair.one(ids, stopped)["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize("start", [-1, 0, 20])
def test_log_probabilities_are_those_of_one(single: Engine, pair: EnginePair, start: int) -> None:
    asked = [drawn(7, 30), drawn(8, 140)]  # the second in chunks
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    options = {
        "return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 9], "logprob_start_len": start,
    }  # fmt: skip
    wanted = single.generate(input_ids=asked, sampling_params=params, **options)
    for _ in range(2):
        for one, two in zip(wanted, pair.generate(asked, params, **options), strict=True):
            assert essence(one) == essence(two)
            columns = [name for name in one["meta_info"] if name.endswith("logprobs")]
            assert len(columns) == 6 and columns == [n for n in two["meta_info"] if n.endswith("logprobs")]
            for name in columns:
                same_column(one["meta_info"][name], two["meta_info"][name])


def test_n_answers_a_prompt(single: Engine, pair: EnginePair) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 12, "sampling_seed": 3, "n": 3}
    asked = [drawn(9, 33), drawn(10, 5)]
    wanted = single.generate(input_ids=asked, sampling_params=params)
    assert list(map(essence, pair.generate(asked, params, n=3))) == list(map(essence, wanted))
    assert len({tuple(out["output_ids"]) for out in wanted[:3]}) == 3


def test_the_prefill_side_counts_what_it_had_cached(single: Engine, pair: EnginePair) -> None:
    """The answer says what the prompt's own server found."""
    ids = drawn(12, 320)
    params = {"temperature": 0, "max_new_tokens": 5}
    cold, warm = pair.one(ids, params), pair.one(ids, params)
    assert cold["meta_info"]["cached_tokens"] == 0
    page = pair.prefill.settings.cache.page_size
    assert warm["meta_info"]["cached_tokens"] == (len(ids) - 1) // page * page
    assert essence(cold) == essence(warm) == essence(single.generate(input_ids=ids, sampling_params=params))


def test_only_what_the_decode_side_lacks_is_sent(single: Engine, pair: EnginePair) -> None:
    """A second turn on a decode side with a prefix cache: all but its newest page is there."""
    ids = drawn(13, 200)
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    first = pair.one(ids, params)
    asked = ids + first["output_ids"] + drawn(14, 9)
    second = pair.one(asked, params)
    assert essence(second) == essence(single.generate(input_ids=asked, sampling_params=params))
    sent = pair.check_books().requests.set_index("rid").loc[second["meta_info"]["id"]]
    per_token = (
        pair.check_books().requests.set_index("rid").loc[first["meta_info"]["id"]].transfer_bytes / 200
    )
    cached = pair.decode.settings.disaggregation.disaggregation_decode_enable_radix_cache
    lacks = len(asked) - (len(ids) + 39) // 16 * 16 if cached else len(asked)
    assert sent.transfer_bytes == lacks * per_token


def test_a_stream_is_that_of_one(single: Engine, pair: EnginePair) -> None:
    ids = drawn(15, 60)
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True, "stream_interval": 1}
    wanted = single.generate(input_ids=ids, sampling_params=params)
    meeting = {"rid": "streamed", **pair.meeting(None)}

    async def read(engine: Engine) -> list[Output]:
        return [part async for part in engine.stream(input_ids=ids, sampling_params=params, **meeting)]

    with ThreadPoolExecutor(2) as pool:
        prefilled, parts = pool.map(lambda engine: asyncio.run(read(engine)), (pair.prefill, pair.decode))
    assert essence(parts[-1]) == essence(wanted)
    for part in parts:
        assert wanted["output_ids"][: len(part["output_ids"])] == part["output_ids"]
        assert wanted["text"].startswith(part["text"]) or part["text"].endswith("\ufffd")
    assert prefilled[-1]["output_ids"] == wanted["output_ids"][:1]


@pytest.mark.parametrize("event_loop", ["normal", "overlap"])
@pytest.mark.parametrize("kept", ["keep", "recompute"])
def test_a_decode_side_that_runs_out_of_memory_says_the_same(
    single: Engine, kept: str, event_loop: str
) -> None:
    """Requests give up their KV and come back, on pages that do not divide the prefill side's."""
    asked = [drawn(20 + number, 9 + 5 * number) for number in range(8)]
    params = {"temperature": 0, "max_new_tokens": 60}
    wanted = single.generate(input_ids=asked, sampling_params=params)
    small = {
        "max_total_tokens": 288, "page_size": 6, "event_loop": event_loop, "num_reserved_decode_tokens": 4,
        "disaggregation_decode_retraction": kept,
    }  # fmt: skip
    with engine_pair(MODEL, max_total_tokens=4096, prefill={"page_size": 16}, decode=small) as both:
        found = both.generate(asked, params)
        both.check_books()
        both.check_idle()
    assert sum(output["meta_info"]["num_retractions"] for output in found) > 0
    assert list(map(essence, found)) == list(map(essence, wanted))
