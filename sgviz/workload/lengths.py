"""Lengths in tokens: a number, a range `(low, high)`, or a distribution. Drawn from a seeded `random.Random`.

Imports: errors.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from sgviz.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any whole number from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise BadRequest(f"a range of lengths is 1 <= low <= high, got {self.low} to {self.high}")

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
        if self.median < 1 or self.sigma < 0 or not 1 <= self.low <= self.high:
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
        if not self.values or min(self.values) < 1:
            raise BadRequest(f"Choice needs lengths of at least 1, got {self.values}")
        if self.weights is not None and len(self.weights) != len(self.values):
            raise BadRequest(f"Choice has {len(self.values)} values and {len(self.weights)} weights")

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self.values, self.weights)[0]


Length = int | tuple[int, int] | Uniform | LogNormal | Choice
"""What callers may give; a plain number is that length always, a pair is `Uniform`."""


def distribution(length: Length, name: str) -> Uniform | LogNormal | Choice:
    """The distribution that `length` stands for. BadRequest names the argument at fault."""
    if isinstance(length, int) and not isinstance(length, bool):
        if length < 1:
            raise BadRequest(f"{name} is {length}; a length is at least 1 token", param=name)
        return Uniform(length, length)
    if isinstance(length, tuple) and len(length) == 2:
        return Uniform(*length)
    if isinstance(length, Uniform | LogNormal | Choice):
        return length
    raise BadRequest(
        f"{name} is {length!r}; give a number, (low, high), Uniform, LogNormal or Choice", param=name
    )
