"""Log-probabilities of prompts and of chosen ids: those of transformers, in every arrangement."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from greedy_reference import Reference

from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model

TOLERANCE = 2e-4  # float32: sums of logits in another order
TOPS = 4
CHOSEN = [7, 300, 7, 12]
Meta = dict[str, Any]


def prompts(seed: int) -> list[list[int]]:
    """Random ids, half of them behind a common head, 1 to 120 long."""
    draw = random.Random(seed)
    head = [draw.randrange(3, 256) for _ in range(48)]
    tails = [[draw.randrange(3, 256) for _ in range(length)] for length in (1, 2, 17, 40, 72, 72)]
    return [head + tail if i % 2 else tail for i, tail in enumerate(tails)]


def ask(model: str, asked: list[list[int]], starts: list[int], **settings: object) -> list[Meta]:
    """meta_info of each prompt, all at once; then once more, when all of them are in the cache."""
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    with Engine(model, torch_threads=1, max_total_tokens=4096, **settings) as engine:
        runs = [
            engine.generate(
                input_ids=asked,
                sampling_params=params,
                return_logprob=True,
                logprob_start_len=starts,
                top_logprobs_num=TOPS,
                token_ids_logprob=CHOSEN,
            )
            for _ in range(2)
        ]
        assert [out["meta_info"]["cached_tokens"] for out in runs[1]] == [
            min(start, len(ids) - 1) // engine.settings.cache.page_size * engine.settings.cache.page_size
            if not engine.settings.cache.disable_radix_cache
            else 0
            for ids, start in zip(asked, starts)
        ]
    return [{**out["meta_info"], "ids": out["output_ids"]} for out in [*runs[0], *runs[1]]]


def check(reference: Reference, ids: list[int], start: int, meta: Meta) -> None:
    whole = ids + meta["ids"]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([whole])).logits[0].float()
    expected = logits.log_softmax(-1)
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids[start:]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None and meta["input_token_ids_logprobs"][0] is None
    for place in range(start + 1, len(ids)):
        row = expected[place - 1]
        at = place - start
        _near(meta["input_token_logprobs"][at][0], row[ids[place]])
        _check_row(row, meta["input_top_logprobs"][at], meta["input_token_ids_logprobs"][at])
    for place in range(len(ids), len(whole)):
        row, at = expected[place - 1], place - len(ids)
        _near(meta["output_token_logprobs"][at][0], row[whole[place]])
        _check_row(row, meta["output_top_logprobs"][at], meta["output_token_ids_logprobs"][at])


def _check_row(row: torch.Tensor, tops: list[Any], chosen: list[Any]) -> None:
    assert len(tops) == TOPS
    for (value, token, _), best in zip(tops, row.topk(TOPS).values):
        _near(value, best)
        _near(value, row[token])
    assert [token for _, token, _ in chosen] == CHOSEN
    for value, token, _ in chosen:
        _near(value, row[token])


def _near(ours: float, theirs: torch.Tensor) -> None:
    assert ours == pytest.approx(float(theirs), abs=TOLERANCE)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_they_are_those_of_transformers(model: str) -> None:
    asked = prompts(1)
    starts = [0] * len(asked)
    reference = Reference(resolve_model(model))
    for ids, meta in zip(asked * 2, ask(model, asked, starts), strict=True):
        check(reference, ids, 0, meta)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 16, "event_loop": "overlap"},
        {"chunked_prefill_size": 64, "page_size": 16},
        {"disable_radix_cache": True, "event_loop": "overlap"},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 32},
    ],
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()),
)
def test_however_they_are_scheduled(settings: dict[str, object]) -> None:
    asked, draw = prompts(2), random.Random(3)
    starts = [draw.randrange(len(ids)) for ids in asked]
    reference = Reference(resolve_model("tiny-llama"))
    for ids, start, meta in zip(
        asked * 2, starts * 2, ask("tiny-llama", asked, starts, **settings), strict=True
    ):
        check(reference, ids, start, meta)


def test_copies_of_a_prompt_share_what_is_computed_once() -> None:
    ids = prompts(4)[4]
    params = {"temperature": 1.0, "max_new_tokens": 3, "n": 3, "sampling_seed": 1, "ignore_eos": True}
    reference = Reference(resolve_model("tiny-llama"))
    with Engine("tiny-llama", torch_threads=1, max_total_tokens=2048) as engine:
        outs = engine.generate(
            input_ids=ids,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=TOPS,
            token_ids_logprob=CHOSEN,
        )
    assert len(outs) == 3
    for out in outs:
        check(reference, ids, 0, {**out["meta_info"], "ids": out["output_ids"]})


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_changes_nothing(overlap: bool) -> None:
    """A pool for a few of the answers at once: who goes back computes again, but tells nothing twice."""
    asked = [ids[:40] for ids in prompts(5)] * 2
    starts = [at % len(ids) for at, ids in enumerate(asked)]
    params = {"temperature": 0, "max_new_tokens": 60}
    with Engine(
        "tiny-llama",
        torch_threads=1,
        max_total_tokens=200,
        schedule_conservativeness=0.001,
        chunked_prefill_size=16,
        disable_overlap_schedule=not overlap,
    ) as engine:
        outs = engine.generate(
            input_ids=asked,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=starts,
            top_logprobs_num=TOPS,
            token_ids_logprob=CHOSEN,
        )
    assert sum(out["meta_info"]["num_retractions"] for out in outs) > 0
    reference = Reference(resolve_model("tiny-llama"))
    for ids, start, out in zip(asked, starts, outs, strict=True):
        meta = out["meta_info"]
        assert len(meta["input_token_logprobs"]) == len(ids) - start
        assert (
            len(meta["output_token_logprobs"])
            == len(meta["output_token_ids_logprobs"])
            == len(out["output_ids"])
        )
        check(reference, ids, start, {**meta, "ids": out["output_ids"]})
