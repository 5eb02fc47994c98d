"""Logits equal transformers', however a prompt is cut, batched and paged."""

from __future__ import annotations

import pytest
import torch
import transformers
from model_driver import Driver, Sequence
from torch import Tensor

from sgviz.model.decoder import CausalLM
from sgviz.model.fetch import resolve_model, tiny_models
from sgviz.model.loader import load_model

TOLERANCE = 1e-4
LENGTHS = (37, 1, 16, 5, 64, 17)


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> CausalLM:
    return load_model(resolve_model(name), dtype="float32")


@pytest.fixture(scope="module")
def prompts(model: CausalLM) -> list[list[int]]:
    rng = torch.Generator().manual_seed(7)
    vocab = model.config.facts.vocab_size
    return [torch.randint(0, vocab, (length,), generator=rng).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(name: str, prompts: list[list[int]]) -> list[Tensor]:
    """Logits at every position of every prompt, by transformers."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32)
    with torch.no_grad():
        return [hf(torch.tensor([ids])).logits[0] for ids in prompts]


@pytest.fixture(params=[1, 16])
def driver(request: pytest.FixtureRequest, model: CausalLM) -> Driver:
    return Driver(model, page_size=request.param)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_repository_holds_the_three_tiny_models() -> None:
    assert tiny_models() == ["tiny-llama", "tiny-qwen2", "tiny-qwen3"]


def test_whole_prefill(driver: Driver, prompts: list[list[int]], reference: list[Tensor]) -> None:
    for ids, expected in zip(prompts, reference):
        logits = driver.step([Sequence(ids)], [len(ids)])
        assert logits.dtype is torch.float32
        assert_close(logits[0], expected[-1])


@pytest.mark.parametrize("chunk", [1, 3, 16, 24])
def test_chunked_prefill(
    driver: Driver, prompts: list[list[int]], reference: list[Tensor], chunk: int
) -> None:
    for ids, expected in zip(prompts[:3], reference):
        sequence = Sequence(ids)
        while sequence.done < len(ids):
            logits = driver.step([sequence], [min(chunk, len(ids) - sequence.done)])
            assert_close(logits[0], expected[sequence.done - 1])


def test_prefill_of_several_lengths_in_one_batch(
    driver: Driver, prompts: list[list[int]], reference: list[Tensor]
) -> None:
    logits = driver.step([Sequence(ids) for ids in prompts], [len(ids) for ids in prompts])
    assert_close(logits, torch.stack([expected[-1] for expected in reference]))


def test_decode_of_several_lengths_in_one_batch(
    driver: Driver, prompts: list[list[int]], reference: list[Tensor]
) -> None:
    """Every prompt decodes its own last six ids beside the others."""
    chosen = [i for i, ids in enumerate(prompts) if len(ids) > 6]
    sequences = [Sequence(prompts[i]) for i in chosen]
    driver.step(sequences, [len(sequence.ids) - 6 for sequence in sequences])
    for step in range(6):
        logits = driver.step(sequences, [1] * len(sequences))
        assert_close(logits, torch.stack([reference[i][step - 6] for i in chosen]))


def test_mixed_batch(driver: Driver, prompts: list[list[int]], reference: list[Tensor]) -> None:
    """A chunk with prefix, a fresh prompt and two decoding requests share a forward, not in order of kind."""
    decoding, chunked, other = Sequence(prompts[2]), Sequence(prompts[0]), Sequence(prompts[5])
    driver.step([decoding, chunked, other], [15, 20, 16])
    logits = driver.step([decoding, chunked, Sequence(prompts[4]), other], [1, 10, 64, 1])
    assert_close(logits[0], reference[2][15])
    assert_close(logits[1], reference[0][29])
    assert_close(logits[2], reference[4][63])
    assert_close(logits[3], reference[5][16])


def test_a_row_does_not_depend_on_its_batch(model: CausalLM, prompts: list[list[int]]) -> None:
    ids = prompts[0]
    alone, together = Driver(model, 16, seed=1), Driver(model, 16, seed=2)
    expected = alone.step([Sequence(ids)], [len(ids)])[0]
    logits = together.step([Sequence(other) for other in prompts], [len(other) for other in prompts])
    torch.testing.assert_close(logits[0], expected, atol=1e-5, rtol=1e-5)
