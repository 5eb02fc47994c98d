"""Lengths in tokens: a number, a range `(low, high)`, or a distribution. Drawn from a seeded `random.Random`.

Imports: errors.
"""

from __future__ import annotations

import math
import operator
import random
from dataclasses import dataclass

from sgviz.errors import BadRequest
from sgviz.workload.numbers import check_above_zero, check_counts, check_not_negative, is_whole


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any whole number from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not (is_whole(self.low) and is_whole(self.high) and 1 <= self.low <= self.high):
            raise BadRequest(
                f"a range of lengths is 1 <= low <= high, whole numbers, got {self.low!r} to {self.high!r}"
            )

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Median `median`, spread `sigma` (of the logarithm), cut to `low` .. `high`: how real lengths look."""

    median: float
    sigma: float
    low: int = 1
    high: int = 1 << 20

    def __post_init__(self) -> None:
        check_above_zero(median=self.median)
        check_not_negative(sigma=self.sigma)
        check_counts(low=self.low, high=self.high)
        if self.median < 1 or self.low > self.high:
            raise BadRequest(f"LogNormal needs median >= 1, sigma >= 0 and 1 <= low <= high, got {self}")

    def draw(self, rng: random.Random) -> int:
        value = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(self.high, max(self.low, value))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `values`, with `weights` or evenly."""

    values: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.values or not all(is_whole(value) and value >= 1 for value in self.values):
            raise BadRequest(f"Choice needs whole lengths of at least 1, got {self.values!r}")
        if self.weights is not None and len(self.weights) != len(self.values):
            raise BadRequest(f"Choice has {len(self.values)} values and {len(self.weights)} weights")
        if self.weights is not None:
            check_not_negative(**{f"weight {place}": weight for place, weight in enumerate(self.weights)})
            check_above_zero(weights=sum(self.weights))

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self.values, self.weights)[0]


Length = int | tuple[int, int] | Uniform | LogNormal | Choice
"""What callers may give; a plain number is that length always, a pair is `Uniform`."""


def distribution(length: Length, name: str) -> Uniform | LogNormal | Choice:
    """The distribution that `length` stands for. BadRequest names the argument at fault."""
    if is_whole(length):
        tokens = operator.index(length)
        if tokens < 1:
            raise BadRequest(f"{name} is {length}; a length is at least 1 token", param=name)
        return Uniform(tokens, tokens)
    if isinstance(length, tuple) and len(length) == 2:
        return Uniform(*length)
    if isinstance(length, Uniform | LogNormal | Choice):
        return length
    raise BadRequest(
        f"{name} is {length!r}; give a number, (low, high), Uniform, LogNormal or Choice", param=name
    )
