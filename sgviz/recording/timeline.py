"""What the scheduler's thread and the device did at every moment, as one line of segments.

The device has the say while it runs; else the scheduler's own work counts. Built once for a recording, and
cut to pieces for each request. Mirrors the two streams (CPU and GPU) of SGLang's overlap drawings.

Imports: recording, numpy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sgviz.recording.fold import BatchState

Longs = npt.NDArray[np.int64]
NEVER = 2**63 - 1


class Doing(IntEnum):
    """What goes on in a segment, weakest first."""

    NOTHING = 0
    LOOP = 1
    SCHEDULE = 2
    PROCESS = 3
    HANDOVER = 4
    DEVICE = 5


@dataclass(frozen=True, slots=True)
class Timeline:
    """Segment `i` lasts from `edges[i]` to `edges[i + 1]` (monotonic ns): `doing[i]` for batch `bids[i]`."""

    edges: Longs
    doing: npt.NDArray[np.int8]
    bids: Longs

    def cut(self, start: int, end: int) -> tuple[Longs, Longs, npt.NDArray[np.int8], Longs]:
        """`(starts, ends, doing, bids)` of the segments between two moments, cut to fit; they may not cover."""
        if len(self.edges) < 2 or end <= start:
            none = np.empty(0, dtype=np.int64)
            return none, none, np.empty(0, dtype=np.int8), none
        first = max(0, int(np.searchsorted(self.edges, start, "right")) - 1)
        last = min(int(np.searchsorted(self.edges, end, "left")), len(self.edges) - 1)
        starts = np.maximum(self.edges[first:last], start)
        ends = np.minimum(self.edges[first + 1 : last + 1], end)
        keep = (ends > starts) & (self.doing[first:last] > Doing.NOTHING)
        return starts[keep], ends[keep], self.doing[first:last][keep], self.bids[first:last][keep]


def timeline(batches: Iterable[BatchState], idles: Sequence[int] = ()) -> Timeline:
    """The line of a recording. `idles`: when the loop told that it was idle."""
    known = [batch for batch in batches if batch.planned]
    layers = {
        Doing.LOOP: _loops(known, idles),
        Doing.SCHEDULE: [(b.turn or b.planned, b.launched, b.plan.bid) for b in known if b.launched],
        Doing.PROCESS: [(_begun(b), b.processed, b.plan.bid) for b in known if b.processed and _begun(b)],
        Doing.HANDOVER: [(b.waited, b.finished, b.plan.bid) for b in known if b.waited and b.finished],
        Doing.DEVICE: [(*span, b.plan.bid) for b in known if b.end for span in _device(b)],
    }
    arrays = {doing: _disjoint(spans) for doing, spans in layers.items()}
    edges = np.unique(np.concatenate([spans[:, :2].ravel() for spans in arrays.values()]))
    if len(edges) < 2:
        return Timeline(edges, np.empty(0, dtype=np.int8), np.empty(0, dtype=np.int64))
    begins = edges[:-1]
    doing = np.zeros(len(begins), dtype=np.int8)
    bids = np.zeros(len(begins), dtype=np.int64)
    for what, spans in arrays.items():
        if len(spans):
            at = np.searchsorted(spans[:, 0], begins, "right") - 1
            inside = (at >= 0) & (begins < spans[at, 1])
            doing[inside] = what
            bids[inside] = spans[at[inside], 2]
    return Timeline(edges, doing, bids)


def _begun(batch: BatchState) -> int:
    """When its result was taken up; of a prebuilt batch, which nothing is computed for, when it was fixed."""
    return batch.planned if batch.plan.mode == "prebuilt" else batch.finished


def _device(batch: BatchState) -> Iterable[tuple[int, int]]:
    """When the device worked at it: forward and sampling, in one where nothing came between."""
    if batch.forward[1] == batch.sampling[0]:
        return ((batch.start, batch.end),)
    return batch.forward, batch.sampling


def _loops(batches: Sequence[BatchState], idles: Sequence[int]) -> list[tuple[int, int, int]]:
    """Between its works: from a result in its requests to the next turn that launched something, or, in a turn that
    launched nothing, to the wait for the next result, unless the loop was idle; and from a launch to such a wait."""
    waits = sorted(b.waited for b in batches if b.waited)
    turns = sorted(b.turn or b.planned for b in batches if b.launched)
    spans = []
    for batch in batches:
        if batch.launched and (at := bisect_left(waits, batch.launched)) < len(waits):
            spans.append((batch.launched, waits[at], batch.plan.bid))
        if not batch.processed:
            continue
        # its own wait may have ended at the moment at which it began
        end = min(_next(turns, batch.processed), _next(waits, batch.processed + 1))
        if end < NEVER:
            spans.append((batch.processed, min(end, _next(idles, batch.processed)), batch.plan.bid))
    return spans


def _next(stamps: Sequence[int], t: int) -> int:
    """The first of them from `t` on."""
    at = bisect_left(stamps, t)
    return stamps[at] if at < len(stamps) else NEVER


def _disjoint(spans: Sequence[tuple[int, int, int]]) -> Longs:
    """`[n, 3]` sorted by start, each cut where the next begins, empty ones left out."""
    if not spans:
        return np.empty((0, 3), dtype=np.int64)
    array = np.array(spans, dtype=np.int64)
    array = array[np.argsort(array[:, 0], kind="stable")]
    array[:-1, 1] = np.minimum(array[:-1, 1], array[1:, 0])
    return array[array[:, 1] > array[:, 0]]
