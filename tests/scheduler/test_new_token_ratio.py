"""The share of the remaining output that is reserved: start, decay, jump."""

from __future__ import annotations

import pytest

from sgviz.scheduler.new_token_ratio import NewTokenRatio


def test_start_floor_and_step() -> None:
    ratio = NewTokenRatio.from_conservativeness(1.0)
    assert (ratio.current, ratio.minimum) == (pytest.approx(0.7), pytest.approx(0.098))
    assert ratio.step == pytest.approx(0.0010033, abs=1e-7)


def test_the_floor_is_reached_after_600_steps_and_held() -> None:
    ratio = NewTokenRatio.from_conservativeness(1.0)
    for _ in range(599):
        ratio.decay()
    assert ratio.current > ratio.minimum + ratio.step / 2
    ratio.decay()
    assert ratio.current == pytest.approx(0.098)
    for _ in range(100):
        ratio.decay()
    assert ratio.current == pytest.approx(0.098) and ratio.current >= ratio.minimum


def test_a_retraction_sets_it_from_the_survivors() -> None:
    ratio = NewTokenRatio.from_conservativeness(1.0)
    assert ratio.after_retraction([(10, 100), (20, 100), (30, 100)]) == pytest.approx(120 / 301)
    assert ratio.current == pytest.approx(0.3987, abs=1e-4)


def test_it_never_exceeds_one() -> None:
    ratio = NewTokenRatio.from_conservativeness(1.0)
    assert ratio.after_retraction([(5, 10)]) == 1.0
    assert NewTokenRatio.from_conservativeness(5.0).current == 1.0


def test_idle_starts_again() -> None:
    ratio = NewTokenRatio.from_conservativeness(0.5)
    ratio.decay()
    ratio.reset()
    assert ratio.current == pytest.approx(0.35)
