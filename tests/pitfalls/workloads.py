"""Workloads for the chapters on memory and scheduling, and the comparison of two runs of one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from sgviz.engine import Engine
from sgviz.events.schema import Body

TOLERANCE = 1e-4  # float32 sums in batches of other sizes
VOCAB = 312


@dataclass(frozen=True)
class Answer:
    """What a client can see of one answer."""

    ids: list[int]
    text: str
    logprobs: list[float]
    usage: tuple[int, int]
    reason: dict[str, Any]


def make_engine(**settings: Any) -> Engine:
    return Engine("tiny-llama", **{"torch_threads": 1, "max_total_tokens": 8192, **settings})


def workload(
    seed: int, count: int, *, longest: int = 60, tokens: int = 24
) -> tuple[list[list[int]], list[dict]]:
    """Prompts of 1 to `longest` + 20 ids, half of them with a common head, and their sampling: greedy and seeded."""
    chance = random.Random(seed)
    heads = [[chance.randrange(4, VOCAB) for _ in range(longest)] for _ in range(3)]
    prompts, params = [], []
    for number in range(count):
        head = chance.choice(heads)[: chance.randrange(longest + 1)] if number % 2 else []
        prompts.append(head + [chance.randrange(4, VOCAB) for _ in range(chance.randrange(1, 21))])
        sampled = (
            {"temperature": 0.9, "sampling_seed": number, "top_k": 40}
            if number % 3 == 0
            else {"temperature": 0}
        )
        params.append(
            {"max_new_tokens": chance.randrange(1, tokens + 1), "ignore_eos": number % 4 > 0, **sampled}
        )
    return prompts, params


def run(engine: Engine, prompts: list[list[int]], params: list[dict]) -> list[Answer]:
    """All at once, with logprobs."""
    outs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    return [answer_of(out) for out in outs]


def run_streamed(engine: Engine, prompts: list[list[int]], params: list[dict]) -> list[Answer]:
    """The same streamed; every piece must go on from the one before, and each index end once."""
    last: dict[int, dict] = {}
    for part in engine.stream_sync(input_ids=prompts, sampling_params=params, return_logprob=True):
        before = last.get(part["index"])
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None
            assert len(part["output_ids"]) > len(before["output_ids"]) or part["meta_info"]["finish_reason"]
            assert part["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert part["text"].startswith(before["text"])
        last[part["index"]] = part
    return [answer_of(last[index]) for index in range(len(prompts))]


def answer_of(out: dict) -> Answer:
    """What one output of an engine says."""
    meta = out["meta_info"]
    return Answer(
        ids=out["output_ids"],
        text=out["text"],
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        usage=(meta["prompt_tokens"], meta["completion_tokens"]),
        reason=meta["finish_reason"],
    )


def assert_same(found: list[Answer], wanted: list[Answer]) -> None:
    """The same ids, text, counts and reasons, and logprobs up to rounding."""
    assert [answer.ids for answer in found] == [answer.ids for answer in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one.text, one.usage, one.reason) == (other.text, other.usage, other.reason)
        assert len(one.logprobs) == len(one.ids)
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


def bodies(engine: Engine, *kinds: type[Body]) -> list[Any]:
    return [event.body for event in engine.pipeline.ring.snapshot() if isinstance(event.body, kinds)]


def assert_books_balance(engine: Engine) -> None:
    """Nobody holds memory any more, and the fold of the events agrees with the scheduler throughout."""
    state = engine.internal_state()
    assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0, state
    assert state["available_tokens"] + state["evictable_tokens"] == state["max_total_num_tokens"]
    assert state["free_rows"] == state["max_running_requests"]
    recording = engine.recording()
    assert recording.dropped == 0 and recording.check() == []
