"""The time in which a debugger held the scheduler, laid over what a request waited for.

Whatever the scheduler owed a request then, it is the debugger that it waited for; what the device and the other
processes did meanwhile they did. SGLang has no debugger, so nothing like it.

Imports: recording.explanation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from sgviz.recording.explanation import WAITS, Cause, Part

# what only a scheduler that goes on could have ended
HELD = WAITS | {
    Cause.INBOX, Cause.INTAKE, Cause.SCHEDULING, Cause.HANDOVER, Cause.PROCESSING, Cause.LOOP, Cause.SEND,
    Cause.UNEXPLAINED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Park:
    """From `start` to `end` (monotonic ns) the scheduler stood still; `words`: where and why."""

    start: int
    end: int
    words: str


class Parked:
    """All such times of a recording, in order; they never overlap."""

    def __init__(self, parks: Sequence[Park]) -> None:
        self._parks = parks
        self._ends = [park.end for park in parks]

    def touches(self, start: int, end: int) -> bool:
        """Whether the scheduler was held at some time between the two."""
        at = bisect_right(self._ends, start)
        return at < len(self._parks) and self._parks[at].start < end

    def over(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The same time, with its own cause where the scheduler was held; neighbours of one stop are one part."""
        last: Part | None = None
        for part in parts:
            for piece in self._cut(part):
                if last is not None and _go_together(last, piece):
                    piece = msgspec.structs.replace(last, duration_ns=last.duration_ns + piece.duration_ns)
                elif last is not None:
                    yield last
                last = piece
        if last is not None:
            yield last

    def _cut(self, part: Part) -> Iterator[Part]:
        start, end = part.start_ns, part.end_ns
        at = bisect_right(self._ends, start) if part.cause in HELD else len(self._parks)
        while at < len(self._parks) and self._parks[at].start < end:
            park = self._parks[at]
            begin, until = max(park.start, start), min(park.end, end)
            if begin > start:
                yield _piece(part, start, begin)
            yield Part(begin, until - begin, Cause.PARKED, (), park.words)
            start, at = until, at + 1
        if start == part.start_ns:
            yield part
        elif start < end:
            yield _piece(part, start, end)


def _piece(part: Part, start: int, end: int) -> Part:
    return Part(start, end - start, part.cause, part.blockers, part.detail, part.bid)


def _go_together(last: Part, piece: Part) -> bool:
    same = (last.end_ns, last.detail, last.blockers) == (piece.start_ns, piece.detail, piece.blockers)
    return last.cause is piece.cause is Cause.PARKED and same
