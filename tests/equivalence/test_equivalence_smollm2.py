"""SmolLM2 in float32 against transformers: 20 prompts of 64 tokens, in every arrangement the pipeline has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from greedy_reference import Reference
from pressure import pressed

from sgviz.config import DEFAULT_MODEL
from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
EOS = (2,)
GREEDY = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
QUESTIONS = (
    "What is the capital of France?", "Name three primary colours.", "Why is the sky blue?",
    "Write a haiku about the sea.", "Translate 'good morning' into Spanish.", "What is 17 times 23?",
    "Explain photosynthesis to a child.", "Who wrote Hamlet?", "List five fruits.", "What is a radix tree?",
    "Give me a recipe for pancakes.", "How do I reverse a list in Python?", "What does HTTP stand for?",
    "Summarise the plot of Cinderella.", "Is the number 91 prime?", "Tell me a joke about computers.",
    "What causes tides?", "How many legs does a spider have?", "Describe a sunset in two sentences.",
    "What is the difference between a process and a thread?",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def run(asked: list[list[int]], **settings: object) -> list[list[int]]:
    with Engine(DEFAULT_MODEL, **settings) as engine:
        return [out["output_ids"] for out in engine.generate(input_ids=asked, sampling_params=GREEDY)]


@pytest.fixture(scope="module")
def plain(asked: list[list[int]]) -> list[list[int]]:
    """All twenty in one batch, cache on, threads."""
    return run(asked)


def test_greedy_ids_are_those_of_transformers(
    asked: list[list[int]], plain: list[list[int]], reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    with reference.telling(f"{DEFAULT_MODEL} and transformers", capsys):
        for prompt, output in zip(asked, plain, strict=True):
            assert len(output) == 64
            reference.check_greedy(prompt, output)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 1},
        {"disable_radix_cache": True, "chunked_prefill_size": -1},
        {"chunked_prefill_size": 16, "page_size": 16},
        {"chunked_prefill_size": 64, "mode": "processes"},
    ],
    ids=json.dumps,
)
def test_the_same_ids_however_they_are_scheduled(
    settings: dict[str, object],
    asked: list[list[int]],
    plain: list[list[int]],
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = run(asked, **settings)
    with reference.telling(f"{DEFAULT_MODEL} {settings}", capsys):
        reference.check_same(asked, plain, outputs)


@pytest.mark.parametrize(("page_size", "event_loop", "tokens"), [(1, "overlap", 48), (16, "normal", 64)])
def test_the_same_ids_retracted_mixed_and_paged_all_at_once(
    page_size: int,
    event_loop: str,
    tokens: int,
    asked: list[list[int]],
    plain: list[list[int]],
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A short one: eight questions, so many tokens each that the pool runs full."""
    outputs, seen = pressed(
        DEFAULT_MODEL, asked[:8], tokens, one_by_one=True, page_size=page_size, event_loop=event_loop
    )
    assert seen["request.retracted"] > 0 and seen["mixed"] > 0 and seen["chunk.cut"] > 0
    told = f"{DEFAULT_MODEL}, page {page_size}, {event_loop}, {seen['request.retracted']} retractions"
    whole = [output[: len(other)] for output, other in zip(plain, outputs)]  # those of `plain` ignore the EOS
    assert all(len(output) == tokens or output[-1] in EOS for output in outputs)
    with reference.telling(told, capsys):
        reference.check_same(asked[:8], whole, outputs)


def test_thirty_two_together(
    asked: list[list[int]],
    plain: list[list[int]],
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = asked + asked[:12]
    outputs = run(many)
    with reference.telling(f"{DEFAULT_MODEL}, 32 together", capsys):
        reference.check_same(many, plain + plain[:12], outputs)
