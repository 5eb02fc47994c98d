"""SmolLM2 in float32 against transformers: 20 prompts of 64 tokens, in every arrangement the pipeline has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from greedy_reference import Reference, same_or_near_tie

from sgviz.config import DEFAULT_MODEL
from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
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
    for prompt, output in zip(asked, plain, strict=True):
        assert len(output) == 64
        reference.check_greedy(prompt, output)
    with capsys.disabled():
        print(f"\n  {reference.report(DEFAULT_MODEL)}", end="")


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
    settings: dict[str, object], asked: list[list[int]], plain: list[list[int]], reference: Reference
) -> None:
    for prompt, a, b in zip(asked, plain, run(asked, **settings), strict=True):
        same_or_near_tie(reference, prompt, a, b)


def test_thirty_two_together(
    asked: list[list[int]], plain: list[list[int]], reference: Reference
) -> None:
    many = asked + asked[:12]
    outputs = run(many)
    for i, output in enumerate(outputs):
        same_or_near_tie(reference, many[i], plain[i % len(asked)], output)
