"""What is refused, with which parameter named, and what the accepted become."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tm_rig import CODEC, LIMITS, params

from sgviz.errors import BadRequest
from sgviz.events import TimeStats
from sgviz.messages import GenerateReqInput, SamplingParams, TokenizedGenerateReqInput
from sgviz.messages.sampling import TOP_K_ALL
from sgviz.tokenizer_manager.tokenize import Preparer

UNBOUNDED_FROM_64 = params(max_new_tokens=None, min_new_tokens=64)
PREPARER = Preparer(CODEC, LIMITS)


def prepare(obj: GenerateReqInput) -> list[TokenizedGenerateReqInput]:
    async def body() -> list[TokenizedGenerateReqInput]:
        return [await PREPARER.tokenize(one, TimeStats()) for one in PREPARER.split(obj)]

    return asyncio.run(body())


def obj(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(**{"sampling_params": params(), **fields})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "text", "exactly one"),
        ({"text": "a", "input_ids": [1]}, "text", "exactly one"),
        ({"text": ""}, "text", "no tokens"),
        ({"text": []}, "text", "empty list"),
        ({"text": ["a", ""]}, "text", "no tokens"),
        ({"text": "a\ud800"}, "text", "surrogate"),
        ({"text": ["a", 1]}, "text", "must be a string"),
        ({"input_ids": []}, "input_ids", "no tokens"),
        ({"input_ids": [[]]}, "input_ids", "no tokens"),
        ({"input_ids": [1, 256]}, "input_ids", "256 is outside the vocabulary"),
        ({"input_ids": [-1]}, "input_ids", "-1 is outside the vocabulary"),
        ({"input_ids": [1, [2]]}, "input_ids", "list of integers"),
        ({"input_ids": [[1], 2]}, "input_ids", "list of integers"),
        ({"input_ids": [1, 2.5]}, "input_ids", "list of integers"),
        ({"input_ids": [1, True]}, "input_ids", "list of integers"),
        ({"text": "x" * 41}, "text", "41 tokens.*at most 40"),
        ({"input_ids": [1] * 64}, "input_ids", "64 tokens.*maximum context length is 64"),
        ({"text": "x" * 40, "sampling_params": params(max_new_tokens=24)}, "max_new_tokens", "at most 23"),
        ({"text": "x", "sampling_params": params(max_new_tokens=2**70)}, "max_new_tokens", "at most 62"),
        (
            {"text": "x", "sampling_params": params(max_new_tokens=None, min_new_tokens=64)},
            "min_new_tokens",
            "62",
        ),
        ({"text": "x", "sampling_params": params(temperature=math.nan)}, "temperature", "nan"),
        ({"text": "x", "sampling_params": params(top_p=0.0)}, "top_p", "0"),
        ({"text": "x", "sampling_params": params(n=10**9)}, "n", "1 and 128"),
        ({"text": "x", "sampling_params": params(sampling_seed=2**63)}, "sampling_seed", "between"),
        ({"text": "x", "sampling_params": params(stop="\udfff")}, "stop", "surrogate"),
        ({"text": ["a", "b"], "sampling_params": [params(), params(n=2)]}, "n", r"same for all.*\[1, 2\]"),
        ({"text": ["a", "b"], "sampling_params": [params()]}, "sampling_params", "1 entries for 2 prompts"),
        ({"text": "a", "sampling_params": [params()]}, "sampling_params", "one prompt"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid", "1 entries"),
        ({"text": ["a", "b"], "rid": ["r", "r"]}, "rid", "'r' is given to more than one"),
        ({"text": "a", "rid": ""}, "rid", "empty"),
        ({"text": "a", "rid": "HEALTH_CHECK_1"}, "rid", "HEALTH_CHECK_"),
        ({"text": "a", "rid": "x\0"}, "rid", "0000 at character 1"),
        ({"text": "a", "rid": "x\ny"}, "rid", "control characters"),
        ({"text": "a", "rid": 7}, "rid", "must be a string"),
        ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num", "-1"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        prepare(obj(**fields))
    assert caught.value.param == param
    assert caught.value.status == 400


def test_a_prompt_may_fill_its_limit_and_the_output_the_rest() -> None:
    (one,) = prepare(obj(text="x" * 40, sampling_params=params(max_new_tokens=23)))
    assert (len(one.input_ids), one.sampling_params.max_new_tokens) == (40, 23)


@given(
    prompt=st.integers(1, 40),
    context=st.integers(10, 100),
    pool=st.integers(10, 100),
    page=st.integers(1, 16),
)
def test_the_output_limit_is_exact(prompt: int, context: int, pool: int, page: int) -> None:
    limits = replace(
        LIMITS,
        context_len=context,
        max_req_len=min(context, pool) - 1,
        max_total_num_tokens=pool,
        page_size=page,
    )
    most = limits.most_new_tokens(prompt)
    assert prompt + most <= context - 1 or not most
    # all pages it touches, and one more, fit into the pool
    assert -(-(prompt + most) // page) * page + page <= -(-pool // page) * page or not most
    preparer = Preparer(CODEC, limits)

    def limit(asked: int | None) -> int | None:
        (one,) = preparer.split(obj(input_ids=[1] * prompt, sampling_params=params(max_new_tokens=asked)))
        return asyncio.run(preparer.tokenize(one, TimeStats())).sampling_params.max_new_tokens

    if prompt > min(context - 1, limits.max_req_input_len):
        return
    assert limit(None) == limit(most) == most
    with pytest.raises(BadRequest, match=f"leave at most {most}") as caught:
        limit(most + 1)
    assert caught.value.param == "max_new_tokens"


def test_values_are_spread_over_a_batch() -> None:
    each = obj(
        input_ids=[[1, 2], [3]], rid="b", return_logprob=[True, False], top_logprobs_num=4, extra_key="",
        stream=True, sampling_params=[params(stop="ab"), params(temperature=0.0)],
    )  # fmt: skip
    one, two = prepare(each)
    assert (one.rid, two.rid) == ("b_0", "b_1")
    assert (one.input_ids, two.input_ids) == ([1, 2], [3])
    assert (one.return_logprob, two.return_logprob) == (True, False)
    assert (one.top_logprobs_num, two.top_logprobs_num) == (4, 0)
    assert (one.extra_key, one.stream) == (None, True)
    assert one.sampling_params.stop == ("ab",)
    assert not one.sampling_params.is_greedy
    assert two.sampling_params.is_greedy


def test_fresh_rids_differ() -> None:
    assert len({one.rid for one in prepare(obj(text=["a"] * 20))}) == 20


def test_huge_limits_mean_no_limit_and_fit_the_message() -> None:
    (one,) = prepare(obj(text="a", sampling_params=params(top_k=2**80, stream_interval=2**80)))
    assert one.sampling_params.top_k == TOP_K_ALL
    assert one.sampling_params.stream_interval == LIMITS.context_len


def test_the_caller_s_request_is_not_changed() -> None:
    mine = obj(text="a", sampling_params=SamplingParams(max_new_tokens=None))
    prepare(mine)
    assert mine == obj(text="a", sampling_params=SamplingParams(max_new_tokens=None))
