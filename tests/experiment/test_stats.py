"""The numbers about numbers."""

from __future__ import annotations

import math

import pytest

from sgviz.experiment.stats import most_at_once, most_per_second, spread, tpot


def test_spread_has_the_names_and_leaves_out_what_is_missing() -> None:
    found = spread([1.0, 2.0, 3.0, math.nan], "ttft")
    assert found["mean_ttft_ms"] == 2 and found["median_ttft_ms"] == 2
    assert found["p99_ttft_ms"] == pytest.approx(2.98) and found["std_ttft_ms"] == pytest.approx(
        0.8165, rel=1e-3
    )
    assert all(math.isnan(value) for value in spread([], "itl").values())


def test_tpot_needs_two_tokens() -> None:
    assert tpot(5.0, 1.0, 5) == 1.0 and math.isnan(tpot(5.0, 1.0, 1))


def test_touching_intervals_are_not_at_once() -> None:
    assert most_at_once([0, 1, 2], [1, 2, 3]) == 1
    assert most_at_once([0, 0.5, 0.9], [1, 2, 3]) == 3 and most_at_once([], []) == 0


def test_the_fullest_second_counts_from_the_first_stamp() -> None:
    assert most_per_second([10.0, 10.9, 11.1, 11.2], [1, 2, 3, 4]) == 7
    assert most_per_second([], []) == 0
