"""A load without an end: seeded, shaped while it is drawn, with as much in common as was asked for."""

from __future__ import annotations

from itertools import takewhile
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.errors import BadRequest
from sgviz.workload import Endless, LoadShape

VOCAB = 5000


def prompts(seed: int, shape: LoadShape, count: int) -> list[list[int]]:
    source = Endless(seed)
    return [source.ids_of(source.next(shape), VOCAB) for _ in range(count)]


@given(tokens=st.integers(1, 200), share=st.floats(0, 1), seed=st.integers(0, 5))
def test_prompts_are_as_long_as_asked_and_share_their_beginning(tokens: int, share: float, seed: int) -> None:
    one, other = prompts(seed, LoadShape(prompt_tokens=tokens, shared_share=share), 2)
    assert len(one) == len(other) == tokens
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
    common = round(tokens * share)
    assert same >= common
    if common <= tokens - 4:  # that four random ids are equal too is a chance of one in many
        assert same < tokens


def test_the_same_seed_draws_the_same_whatever_the_rate_becomes() -> None:
    shape = LoadShape(seed=3)
    assert prompts(3, shape, 5) == prompts(3, shape.changed(rate=99.0), 5)
    assert prompts(3, shape, 5) != prompts(4, shape, 5)
    one, other = Endless(3), Endless(3)
    gaps = [one.gap() for _ in range(500)]
    assert gaps == [other.gap() for _ in range(500)] and fmean(gaps) == pytest.approx(1.0, abs=0.15)


def test_a_change_acts_on_the_next_request() -> None:
    source, shape = Endless(0), LoadShape(prompt_tokens=10, output_tokens=4)
    first = source.next(shape)
    second = source.next(shape.changed(prompt_tokens=20, output_tokens=8))
    assert (first.prompt_tokens, first.output_tokens) == (10, 4)
    assert (second.prompt_tokens, second.output_tokens) == (20, 8) and first.rid != second.rid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0}, "rate"), ({"rate": "5"}, "rate"), ({"shared_share": 1.5}, "shared_share"),
        ({"prompt_tokens": 0}, "prompt_tokens"), ({"concurrency": 0}, "concurrency"), ({"seed": 0.5}, "seed"),
        ({"output_token": 5}, "did you mean 'output_tokens'"),
    ],
)  # fmt: skip
def test_what_no_load_can_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        LoadShape().changed(**changes)


def test_a_shape_without_a_rate_is_a_closed_loop() -> None:
    shape = LoadShape().changed(rate=None, concurrency=3)
    assert shape.rate is None and msgspec.json.decode(msgspec.json.encode(shape), type=LoadShape) == shape
