"""Prompts with a heavy tail: the share of the longest is kept, the tail is there, and bad numbers are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.errors import BadRequest
from sgviz.workload import heavy_tail


@given(
    st.integers(0, 9999),
    st.integers(1, 300),
    st.sampled_from([0.05, 0.1, 1 / 30]),
    st.floats(0.5, 3),
    st.booleans(),
)
def test_no_prompt_has_more_than_its_share(
    seed: int, more: int, share: float, shape: float, cut: bool
) -> None:
    longest = 100 if cut else None
    count = round(1 / share) + more - 1
    made = heavy_tail(
        num_requests=count, output_tokens=1, shape=shape, largest_share=share, longest=longest, seed=seed
    )
    lengths = [request.prompt_tokens for request in made.requests]
    assert len(lengths) == count and min(lengths) >= 1
    assert max(lengths) <= share * sum(lengths) + 1e-6
    assert max(lengths) <= (longest or max(lengths))
    assert all(request.at_s == 0 for request in made.requests)


def test_a_few_prompts_hold_much_of_all_tokens() -> None:
    for seed in range(20):
        made = heavy_tail(num_requests=200, output_tokens=1, seed=seed)
        lengths = sorted(request.prompt_tokens for request in made.requests)
        assert sum(lengths[-20:]) > 0.35 * sum(lengths) and lengths[100] < 50


def test_with_a_rate_they_come_one_after_the_other() -> None:
    made = heavy_tail(num_requests=2000, output_tokens=1, rate=10.0, seed=1)
    assert 150 < made.span_s < 250 and made.requests[0].at_s == 0


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"num_requests": 19}, "largest_share"), ({"shape": 0}, "shape"), ({"largest_share": -0.1}, "largest_share"),
        ({"shape": 0.01}, "shape"), ({"largest_share": 1.5}, "largest_share"),
        ({"shortest": 0}, "shortest"), ({"longest": 5}, "longest"), ({"rate": 0}, "rate"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(given: dict[str, float], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        heavy_tail(**{"num_requests": 50, "output_tokens": 1, **given})
    assert error.value.param == param
