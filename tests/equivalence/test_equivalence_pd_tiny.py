"""Tiny models over a prefill and a decode engine: the ids of a single engine.

Real schedulers, workers, KV managers over shared memory, and a bootstrap server; only the router is played.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from greedy_reference import Reference
from pair_engines import ALL, CHUNKED, PAIRWISE, Arrangement, arranged, name_of

from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model

MODELS = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def prompts(seed: int, count: int) -> list[list[int]]:
    """Random ids, half of them behind a common head, 1 to 120 long; the first has one id only."""
    draw = random.Random(seed)
    head = [draw.randrange(3, 256) for _ in range(48)]
    out = [[draw.randrange(3, 256)]]
    while len(out) < count:
        tail = [draw.randrange(3, 256) for _ in range(draw.randrange(1, 72))]
        out.append(head + tail if len(out) % 2 else tail)
    return out


@dataclass(frozen=True)
class Alone:
    """What a single engine says to each prompt."""

    model: str
    reference: Reference
    asked: list[list[int]]
    plain: list[list[int]]


def alone(model: str) -> Alone:
    asked = prompts(7, 14)
    with Engine(model, torch_threads=1, max_total_tokens=8192, disable_radix_cache=True) as engine:
        plain = [engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"] for ids in asked]
    return Alone(model, Reference(resolve_model(model)), asked, plain)


@pytest.fixture(scope="module")
def llama() -> Alone:
    return alone("tiny-llama")


@pytest.fixture(scope="module", params=MODELS[1:])
def qwen(request: pytest.FixtureRequest) -> Alone:
    return alone(request.param)


@pytest.fixture(scope="module", params=MODELS)
def each(request: pytest.FixtureRequest) -> Alone:
    return alone(request.param)


def check(one: Alone, arrangement: Arrangement, capsys: pytest.CaptureFixture[str]) -> None:
    with arranged(one.model, arrangement) as pair:
        outputs = pair.generate(one.asked, GREEDY)
        again = pair.generate(one.asked, GREEDY)  # from the prefill side's cache
        paired = pair.check_books()
        pair.check_idle()
        kinds = set(pair.prefill.recording().events.kind)
    assert len(paired.rids) == 2 * len(one.asked)
    assert ("chunk.cut" in kinds) is (arrangement[1] == CHUNKED)
    assert sum(out["meta_info"]["cached_tokens"] for out in again) > 0
    with one.reference.telling(f"{one.model} {name_of(arrangement)}", capsys):
        for found in (outputs, again):
            one.reference.check_same(one.asked, one.plain, [out["output_ids"] for out in found])


@pytest.mark.parametrize("arrangement", PAIRWISE, ids=name_of)
def test_a_pair_gives_the_ids_of_one(
    llama: Alone, arrangement: Arrangement, capsys: pytest.CaptureFixture[str]
) -> None:
    check(llama, arrangement, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", PAIRWISE, ids=name_of)
def test_a_pair_of_another_model_gives_the_ids_of_one(
    qwen: Alone, arrangement: Arrangement, capsys: pytest.CaptureFixture[str]
) -> None:
    check(qwen, arrangement, capsys)


@pytest.mark.long
@pytest.mark.parametrize("arrangement", ALL, ids=name_of)
def test_a_pair_gives_the_ids_of_one_in_every_arrangement(
    each: Alone, arrangement: Arrangement, capsys: pytest.CaptureFixture[str]
) -> None:
    check(each, arrangement, capsys)
