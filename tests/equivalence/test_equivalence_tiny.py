"""Tiny Llama, Qwen2 and Qwen3 against transformers, and against themselves in other arrangements."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from greedy_reference import Reference
from pressure import pressed

from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model

MODELS = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
GREEDY = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}


def prompts(seed: int, count: int = 20) -> list[list[int]]:
    """Random ids, half of them behind a common head, 1 to 120 long."""
    draw = random.Random(seed)
    head = [draw.randrange(3, 256) for _ in range(48)]
    out = []
    for i in range(count):
        tail = [draw.randrange(3, 256) for _ in range(draw.randrange(1, 72))]
        out.append(head + tail if i % 2 else tail)
    return out


def run(
    model: str, asked: list[list[int]], *, one_by_one: bool = False, **settings: object
) -> list[list[int]]:
    with Engine(model, torch_threads=1, max_total_tokens=8192, **settings) as engine:
        if one_by_one:
            return [engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"] for ids in asked]
        return [out["output_ids"] for out in engine.generate(input_ids=asked, sampling_params=GREEDY)]


@pytest.mark.parametrize("model", MODELS)
def test_greedy_ids_are_those_of_transformers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference, asked = Reference(resolve_model(model)), prompts(1)
    with reference.telling(f"{model} and transformers", capsys):
        for prompt, output in zip(asked, run(model, asked), strict=True):
            assert len(output) == 64
            reference.check_greedy(prompt, output)


def test_the_check_agrees_with_generate_of_transformers() -> None:
    reference, (prompt,) = Reference(resolve_model("tiny-llama")), prompts(2, 1)
    reference.check_greedy(prompt, reference.generate(prompt, 32))
    with pytest.raises(AssertionError, match="position 0"):
        reference.check_greedy(prompt, [299, *reference.generate(prompt, 3)])


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_radix_cache": True, "chunked_prefill_size": -1},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 64, "page_size": 16},
        {"page_size": 16, "schedule_policy": "lpm"},
        {"event_loop": "overlap", "chunked_prefill_size": 64},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 32},
        {"max_running_requests": 1},
    ],
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()),
)
def test_the_same_ids_however_they_are_scheduled(
    settings: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    reference, asked = Reference(resolve_model("tiny-llama")), prompts(3, 12)
    plain = run("tiny-llama", asked, one_by_one=True)
    with reference.telling(f"tiny-llama {settings}", capsys):
        reference.check_same(asked, plain, run("tiny-llama", asked, **settings))


@dataclass(frozen=True)
class Calm:
    """What a model says to each prompt alone, without a cache."""

    model: str
    reference: Reference
    asked: list[list[int]]
    plain: list[list[int]]


@pytest.fixture(scope="module", params=MODELS)
def calm(request: pytest.FixtureRequest) -> Calm:
    model, asked = request.param, prompts(5, 16)
    with Engine(model, torch_threads=1, max_total_tokens=8192, disable_radix_cache=True) as engine:
        params = {"temperature": 0, "max_new_tokens": 64}
        plain = [engine.generate(input_ids=ids, sampling_params=params)["output_ids"] for ids in asked]
    return Calm(model, Reference(resolve_model(model)), asked, plain)


@pytest.mark.parametrize("event_loop", ["normal", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_same_ids_retracted_mixed_and_paged_all_at_once(
    calm: Calm, page_size: int, event_loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs, seen = pressed(calm.model, calm.asked, 64, page_size=page_size, event_loop=event_loop)
    assert seen["request.retracted"] > 0 and seen["mixed"] > 0 and seen["chunk.cut"] > 0
    told = f"{calm.model}, page {page_size}, {event_loop}, {seen['request.retracted']} retractions"
    with calm.reference.telling(told, capsys):
        calm.reference.check_same(calm.asked, calm.plain, outputs)


def test_a_second_turn_on_the_cache_gives_the_same_ids(capsys: pytest.CaptureFixture[str]) -> None:
    reference, asked = Reference(resolve_model("tiny-qwen3")), prompts(4, 8)
    with Engine("tiny-qwen3", torch_threads=1, max_total_tokens=8192) as engine:
        cold = engine.generate(input_ids=asked, sampling_params=GREEDY)
        warm = engine.generate(input_ids=asked, sampling_params=GREEDY)
    for prompt, out in zip(asked, warm, strict=True):
        assert out["meta_info"]["cached_tokens"] == len(prompt) - 1
    with reference.telling("tiny-qwen3, cached", capsys):
        reference.check_same(asked, [out["output_ids"] for out in cold], [out["output_ids"] for out in warm])
