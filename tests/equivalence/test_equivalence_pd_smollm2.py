"""SmolLM2 in float32 over a prefill and a decode engine: 20 prompts of 64 tokens, every two settings together."""

from __future__ import annotations

from pathlib import Path

import pytest
from greedy_reference import Reference
from pair_engines import PAIRWISE, Arrangement, arranged, engine_pair, name_of
from test_equivalence_smollm2 import GREEDY, QUESTIONS

from sgviz.config import DEFAULT_MODEL
from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


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


@pytest.fixture(scope="module")
def plain(asked: list[list[int]]) -> list[list[int]]:
    with Engine(DEFAULT_MODEL) as engine:
        return [out["output_ids"] for out in engine.generate(input_ids=asked, sampling_params=GREEDY)]


@pytest.mark.parametrize("arrangement", PAIRWISE, ids=name_of)
def test_a_pair_gives_the_ids_of_one(
    arrangement: Arrangement,
    asked: list[list[int]],
    plain: list[list[int]],
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with arranged(DEFAULT_MODEL, arrangement) as pair:
        outputs = pair.generate(asked, GREEDY)
        pair.check_books()
        pair.check_idle()
    with reference.telling(f"{DEFAULT_MODEL} {name_of(arrangement)}", capsys):
        reference.check_same(asked, plain, [out["output_ids"] for out in outputs])


def test_two_ranks_on_each_side_give_the_ids_of_one(
    asked: list[list[int]], plain: list[list[int]], reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = {"page_size": 16, "chunked_prefill_size": 32}
    with engine_pair(DEFAULT_MODEL, dp_size=2, prefill=prefill, disaggregation_checksum=True) as pair:
        outputs = pair.generate(asked, GREEDY)
        pair.check_books()
        pair.check_idle()
    assert {out["meta_info"]["dp_rank"] for out in outputs} == {0, 1}
    with reference.telling(f"{DEFAULT_MODEL} 2+2", capsys):
        reference.check_same(asked, plain, [out["output_ids"] for out in outputs])
