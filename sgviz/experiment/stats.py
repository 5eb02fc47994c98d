"""Numbers about numbers, under the names of SGLang's bench_serving. Imports: numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PERCENTILES = (90, 95, 99)


def spread(values: Sequence[float], name: str) -> dict[str, float]:
    """`mean_NAME_ms`, `median_`, `std_`, `p90_`, `p95_`, `p99_` of milliseconds; NaN where there is no value."""
    array = np.asarray(values, dtype=float)
    array = array[~np.isnan(array)]
    if not len(array):
        found = dict.fromkeys(("mean", "median", "std", *(f"p{p}" for p in PERCENTILES)), math.nan)
    else:
        found = {
            "mean": float(array.mean()),
            "median": float(np.median(array)),
            "std": float(array.std()),
            **{f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES},
        }
    return {f"{which}_{name}_ms": value for which, value in found.items()}


def tpot(e2e: float, ttft: float, tokens: int) -> float:
    """Time per output token after the first; NaN with fewer than two."""
    return (e2e - ttft) / (tokens - 1) if tokens > 1 else math.nan


def most_at_once(starts: Sequence[float], ends: Sequence[float]) -> int:
    """How many of the intervals overlap at the fullest moment."""
    marks = sorted([(end, -1) for end in ends] + [(start, +1) for start in starts])
    now = most = 0
    for _, step in marks:
        now += step
        most = max(most, now)
    return most


def most_per_second(stamps: Sequence[float], counts: Sequence[int]) -> float:
    """The largest sum of `counts` over buckets of one second, counted from the first stamp."""
    if not stamps:
        return 0.0
    first = min(stamps)
    buckets: dict[int, int] = {}
    for stamp, count in zip(stamps, counts):
        buckets[int(stamp - first)] = buckets.get(int(stamp - first), 0) + count
    return float(max(buckets.values()))
