"""A model whose logits are NaN for some requests: these end with a clear error, in both loops, and nobody else notices.

The fault is real: one row of the embedding is NaN, so whoever has that token, in the prompt or as output, gets NaN.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

import sgviz
from sgviz.engine import Engine
from sgviz.errors import SgvizError
from sgviz.events.schema import TreeInserted

BAD = 7  # whoever has this token gets NaN
TINY = Path(sgviz.__file__).parents[1] / "data/tiny-llama"
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "logit_bias": {str(BAD): -100}}
SAID = "logits hold a NaN after {} tokens"
PROMPTS = [[20 + i, 30 + i, 40 + i] * (2 + i) for i in range(6)]
LOOPS = ("normal", "overlap")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "nan-llama"
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def engine(model: str, **settings: Any) -> Engine:
    return Engine(model, **{"max_total_tokens": 512, "torch_threads": 1, **settings})


def answers(made: Engine) -> list[list[int]]:
    outs = made.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return [out["output_ids"] for out in outs]


@pytest.fixture(scope="module")
def healthy() -> list[list[int]]:
    """What the model says with all its weights."""
    with engine(str(TINY)) as made:
        return answers(made)


SETTINGS = {
    "plain": {},
    "pages": {"page_size": 16},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 32},
    "no tree": {"disable_radix_cache": True},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_only_the_request_with_nan_ends_and_its_memory_poisons_nobody(
    model: str, healthy: list[list[int]], loop: str, settings: dict[str, Any]
) -> None:
    with engine(model, event_loop=loop, **settings) as made:
        for round_ in range(3):  # what the broken ones held goes to the healthy ones of the next round
            broken = [[BAD, *prompt] for prompt in PROMPTS]
            prompts = [prompt for pair in zip(broken, PROMPTS) for prompt in pair]
            futures = [
                made.pipeline.loop.submit(made.async_generate(input_ids=prompt, sampling_params=GREEDY))
                for prompt in prompts
            ]
            for future in futures[::2]:
                with pytest.raises(SgvizError, match=SAID.format(0)) as caught:
                    future.result(60)
                assert caught.value.status == 500
            assert [future.result(60)["output_ids"] for future in futures[1::2]] == healthy, round_
        assert answers(made) == healthy
        state = made.internal_state()
        assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "sampled", [{}, {"temperature": 1.0}, {"regex": "[a-z]{30}"}], ids=["greedy", "drawn", "regex"]
)
def test_a_nan_in_the_middle_of_an_answer_ends_it_after_what_was_said(
    model: str, loop: str, sampled: dict[str, Any]
) -> None:
    """The bias lets it say the token itself; under the grammar the prompt has it."""
    prompt = [5, 6, BAD] if "regex" in sampled else [5, 6]
    said = 0 if "regex" in sampled else 1
    params = {**GREEDY, **sampled, "logit_bias": {str(BAD): 100}}
    with engine(model, event_loop=loop) as made:
        url = made.serve(port=0).url
        body = {"input_ids": prompt, "sampling_params": params}
        answer = httpx.post(f"{url}/generate", json=body, timeout=60)
        assert answer.status_code == 500 and SAID.format(said) in answer.json()["error"]["message"]
        with httpx.stream("POST", f"{url}/generate", json={**body, "stream": True}, timeout=60) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert SAID.format(said) in lines[-1] or SAID.format(said) in lines[-2]
        assert made.generate(input_ids=[5, 6], sampling_params=GREEDY)["meta_info"]["completion_tokens"] == 24


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_of_it_stays_in_the_prefix_cache(model: str, loop: str) -> None:
    """Whoever asks the same again gets the same error, not an answer from what lies in the cache."""
    with engine(model, event_loop=loop) as made:
        for _ in range(3):
            with pytest.raises(SgvizError, match=SAID.format(0)):
                made.generate(input_ids=[9, 8, BAD, 9, 8, 9], sampling_params=GREEDY)
        told = [event.body for event in made.pipeline.ring.snapshot()]
        assert not [body for body in told if isinstance(body, TreeInserted)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_long_prompt_that_is_cut_fails_as_often_as_it_is_asked(model: str, loop: str) -> None:
    prompt = [BAD, *range(16, 100)]
    with engine(model, event_loop=loop, chunked_prefill_size=16) as made:
        first = made.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
        for _ in range(3):
            with pytest.raises(SgvizError, match=SAID.format(0)):
                made.generate(input_ids=prompt, sampling_params=GREEDY)
        assert made.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"] == first


@pytest.mark.parametrize("loop", LOOPS)
def test_a_vector_with_nan_is_an_error_and_no_number(model: str, loop: str) -> None:
    with engine(model, event_loop=loop) as made:
        first = made.encode(input_ids=PROMPTS[0])["embedding"]
        for _ in range(2):
            with pytest.raises(SgvizError, match="the model's vector holds a NaN"):
                made.encode(input_ids=[*PROMPTS[0], BAD])
        assert made.encode(input_ids=PROMPTS[0])["embedding"] == pytest.approx(first, abs=1e-6)
