"""Checks of the numbers that workloads are made from. Imports: errors."""

from __future__ import annotations

import math
import operator
from typing import SupportsFloat, SupportsIndex, TypeGuard

from sgviz.errors import BadRequest


def check_counts(least: int = 1, /, **numbers: object) -> None:
    """Raise BadRequest unless each is a whole number of at least `least`."""
    for name, value in numbers.items():
        if not is_whole(value) or operator.index(value) < least:
            raise BadRequest(
                f"{name} is {value!r}; it must be a whole number of at least {least}", param=name
            )


def check_above_zero(**numbers: object) -> None:
    """Raise BadRequest unless each is a finite number above 0."""
    for name, value in numbers.items():
        if not _finite(value) > 0:
            raise BadRequest(f"{name} is {value!r}; it must be a finite number above 0", param=name)


def check_not_negative(**numbers: object) -> None:
    """Raise BadRequest unless each is a finite number of at least 0."""
    for name, value in numbers.items():
        if not _finite(value) >= 0:
            raise BadRequest(f"{name} is {value!r}; it must be a finite number, 0 or more", param=name)


def is_whole(value: object) -> TypeGuard[SupportsIndex]:
    """Of a type that counts; True and False do not, and neither does 3.0."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _finite(value: object) -> float:
    """The number, or NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat | SupportsIndex):
        return math.nan
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan
