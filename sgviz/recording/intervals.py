"""Sets of moments as sorted, disjoint `(start, end)` pairs of nanoseconds: the arithmetic of the overlap account.

Every function takes and gives such lists; `normal` makes one of any pairs. Linear in the number of pairs.
Mirrors nothing in SGLang. Imports: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Intervals = list[Interval]


def normal(pairs: Iterable[Interval]) -> Intervals:
    """Sorted, with overlapping and touching pairs joined and empty ones left out."""
    out: Intervals = []
    for start, end in sorted(pairs):
        if start >= end:
            continue
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def both(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """The moments in `a` and in `b`."""
    out: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def without(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """The moments in `a` that are not in `b`."""
    out: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                out.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            out.append((start, end))
    return out


def total(a: Iterable[Interval]) -> int:
    """Nanoseconds in all."""
    return sum(end - start for start, end in a)
