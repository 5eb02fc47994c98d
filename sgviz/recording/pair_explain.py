"""One request over two servers: whose time counts when, and the transfer between them as a step of its own.

What the client waits for is followed: the prefill side until its prompt is computed (while that waits for the decode
side, the decode side instead), then the transfer, then the decode side. Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from sgviz.recording.explanation import Cause, Explanation, Part
from sgviz.recording.journey import TypeStep, routed_steps
from sgviz.recording.requests import RequestState
from sgviz.recording.routes import ROUTER, Route
from sgviz.recording.tables import NS_PER_MS
from sgviz.recording.transfer_words import carried_words, cut, size_words
from sgviz.recording.transfers import DECODE, PREFILL, TransferState

BETWEEN = "transfer"
_ELSEWHERE = frozenset({Cause.AWAITS_KV, Cause.TRANSFER, Cause.BOOTSTRAP})


@dataclass(frozen=True, slots=True)
class Seen:
    """One request on both sides. `shift`: added to the decode side's times it gives those of the pair (ns).

    `ranks`: the prefill and the decode rank that had it, 0 of a lone one. `several`: there are more on a side.
    """

    rid: str
    prefill: RequestState
    decode: RequestState
    sent: TransferState | None
    came: TransferState | None
    routed: Route | None
    shift: int
    ranks: tuple[int | None, int | None] = (0, 0)
    several: bool = False

    @property
    def computed(self) -> int:
        """When the prompt was computed (0: it was not)."""
        return self.sent.computed if self.sent is not None else 0

    @property
    def arrived(self) -> int:
        """When the decode side saw that all KV was in place (0: it did not)."""
        came = self.came
        good = came is not None and came.outcome is not None and came.outcome.ok
        return came.transferred + self.shift if came is not None and good else 0

    @property
    def placed(self) -> int:
        """When the last piece was in its pages (0: it was not)."""
        came = self.came
        return came.in_place + self.shift if came is not None and came.in_place else 0

    @property
    def travelled_ns(self) -> int:
        """From the first piece being read on the one side to the last one in its pages; 0 if nothing travelled."""
        begun = min((piece.start_ns for piece in self.sent.sent), default=0) if self.sent is not None else 0
        return max(0, self.placed - begun) if begun and self.placed else 0


def both_sides(seen: Seen, prefill: Explanation, decode: Explanation) -> Explanation:
    """One explanation out of those of both sides (each on its own clock)."""
    ours = list(_put(prefill.parts, 0, PREFILL))
    theirs = list(_put(decode.parts, seen.shift, DECODE))
    starts = [parts[0].start_ns for parts in (ours, theirs) if parts]
    ends = [parts[-1].end_ns for parts in (theirs or ours,) if parts]
    if not starts:
        return Explanation(seen.rid, 0, (), done=decode.done, refused=decode.refused or prefill.refused)
    start, end = min(starts), max(ends)
    parts = list(_chosen(seen, ours, theirs, start, end))
    routed = seen.routed
    if routed is not None:
        parts[:0] = routed.parts(start)
        if routed.end > end:
            words = (routed.attempts[-1].failure if routed.attempts else "") or "the rest of the answer"
            parts.append(Part(end, routed.end - end, Cause.ROUTE, (), words, 0, ROUTER))
    total = sum(part.duration_ns for part in parts)
    refused = decode.refused or prefill.refused
    return Explanation(seen.rid, total, tuple(parts), done=decode.done, refused=refused)


def _chosen(seen: Seen, ours: list[Part], theirs: list[Part], start: int, end: int) -> Iterator[Part]:
    """From `start` to `end`, whoever counts then."""
    arrived = seen.arrived or end
    handed = min(seen.computed or (ours[-1].end_ns if ours else start), arrived, end)
    last = start
    for part in _until(_prompted(ours, theirs), handed):
        if part.start_ns > last:  # the prefill side had not heard of it
            yield from _between(theirs, last, part.start_ns)
        yield part
        last = part.end_ns
    if seen.computed and arrived > last:
        words = carried_words(seen.came, seen.travelled_ns) if seen.came is not None else ""
        placed = min(max(seen.placed or arrived, last), arrived)
        if placed > last:  # what is left until the decode side has seen it is its own time
            yield Part(
                last, placed - last, Cause.TRANSFER, (), words + _ways(seen) + _overlapped(seen), 0, BETWEEN
            )
        last = placed
    if last < end:
        yield from _between(theirs, last, end)


def _prompted(ours: Iterable[Part], theirs: list[Part]) -> Iterator[Part]:
    """The prefill side's parts, with what the decode side did while it was waited for."""
    for part in ours:
        if part.cause is not Cause.BOOTSTRAP:
            yield part
            continue
        at = part.start_ns
        for other in theirs:
            piece = None if other.cause in _ELSEWHERE else cut(other, max(at, part.start_ns), part.end_ns)
            if piece is None:
                continue
            if (before := cut(part, at, piece.start_ns)) is not None:
                yield before
            yield piece
            at = piece.end_ns
        if (rest := cut(part, at, part.end_ns)) is not None:
            yield rest


def _until(parts: Iterable[Part], end: int) -> Iterator[Part]:
    for part in parts:
        if (piece := cut(part, part.start_ns, end)) is not None:
            yield piece


def _between(parts: Sequence[Part], start: int, end: int) -> Iterator[Part]:
    """Those between two moments; a gap before, after or within is unexplained."""
    last = start
    for part in parts:
        piece = cut(part, last, end)
        if piece is None:
            continue
        if piece.start_ns > last:
            yield Part(last, piece.start_ns - last, Cause.UNEXPLAINED, side=part.side)
        yield piece
        last = piece.end_ns
    if last < end:
        yield Part(last, end - last, Cause.UNEXPLAINED)


def _ways(seen: Seen) -> str:
    """From whom to whom, where that is a question."""
    return f"; from prefill rank {seen.ranks[0]} to decode rank {seen.ranks[1]}" if seen.several else ""


def _overlapped(seen: Seen) -> str:
    """What had travelled before the prompt was computed."""
    sent = seen.sent
    early = (
        sum(piece.bytes for piece in sent.sent if piece.end_ns <= sent.computed) if sent is not None else 0
    )
    return f"; {size_words(early)} left while the prompt was computed" if early else ""


def _put(parts: Iterable[Part], shift: int, side: str) -> Iterator[Part]:
    for part in parts:
        yield msgspec.structs.replace(part, start_ns=part.start_ns + shift, side=side)


def joined_journey(seen: Seen, prefill: list[TypeStep], decode: list[TypeStep]) -> list[TypeStep]:
    """Both sides' steps from the earlier arrival on, `component` with its side before it."""
    one, two = _origin(seen.prefill), _origin(seen.decode) + seen.shift
    start = min(seen.routed.start if seen.routed is not None else one, one, two)
    steps = [
        replace(step, component=f"{side}/{step.component}", t_ms=step.t_ms + (origin - start) / NS_PER_MS)
        for side, origin, run in ((PREFILL, one, prefill), (DECODE, two, decode))
        for step in run
        if not (step.type == "KV transfer" and side == PREFILL)  # told once, by whom it came to
    ]
    routed = seen.routed
    steps += routed_steps(routed, start) if routed is not None else []
    return sorted(steps, key=lambda step: step.t_ms)


def _origin(request: RequestState) -> int:
    return request.stats.created or min((event.t for event in request.marks.values()), default=0)
