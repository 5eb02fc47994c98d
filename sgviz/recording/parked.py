"""The time in which a debugger or a pause held the engine, laid over what a request waited for.

Whatever the scheduler owed a request then, it is the debugger, or the end of the pause, that it waited for; what the
device and the other processes did meanwhile they did. SGLang has no debugger, and tells no causes of waits.

Imports: events, recording.explanation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from sgviz.events.schema import Event, GenerationContinued, GenerationPaused
from sgviz.recording.explanation import WAITS, Cause, Part

# what only a scheduler that goes on could have ended
HELD = WAITS | {
    Cause.CONTROLLER, Cause.INBOX, Cause.INTAKE, Cause.BOOTSTRAP, Cause.PREALLOC, Cause.SCHEDULING, Cause.HANDOVER,
    Cause.PROCESSING, Cause.LOOP, Cause.SEND, Cause.UNEXPLAINED,
}  # fmt: skip
# what only planning could have ended; the scheduler takes in messages, and grammars are compiled
NOT_PLANNED = (WAITS - {Cause.GRAMMAR, Cause.PARKED}) | {
    Cause.SCHEDULING, Cause.HANDOVER, Cause.LOOP, Cause.UNEXPLAINED,
}  # fmt: skip
NOT_LET_IN = frozenset(
    {Cause.CONVERT, Cause.TOKENIZE, Cause.DISPATCH, Cause.UNEXPLAINED}
)  # requests wait untokenized
NEVER = 1 << 62  # the end of what has not ended


@dataclass(frozen=True, slots=True)
class Park:
    """From `start` to `end` (monotonic ns) something stood still; `words`: where and why."""

    start: int
    end: int
    words: str


class Pauses:
    """The pauses of one component, told by their events."""

    def __init__(self) -> None:
        self.parks: list[Park] = []

    def begin(self, event: Event, body: GenerationPaused) -> None:
        self.parks.append(Park(event.t, NEVER, _pause_words(body.mode)))

    def end(self, event: Event, body: GenerationContinued) -> None:
        """Its beginning may be missing in a recording."""
        if self.parks and self.parks[-1].end == NEVER:
            self.parks.pop()
        self.parks.append(Park(body.since_ns, event.t, _pause_words(body.mode)))


def _pause_words(mode: str) -> str:
    return "other weights are being loaded" if mode == "weights" else f"generation is paused (mode {mode})"


class HeldTimes:
    """All times in which something was held: new requests at the door, planning, the whole scheduler."""

    def __init__(self, gates: Sequence[Park], pauses: Sequence[Park], parks: Sequence[Park]) -> None:
        self._gates = Parked(gates, Cause.PAUSED, NOT_LET_IN)
        self._pauses = Parked(pauses, Cause.PAUSED, NOT_PLANNED)
        self._parks = Parked(parks)

    def touches(self, start: int, end: int) -> bool:
        """Whether the scheduler was held at some time between the two."""
        return self._pauses.touches(start, end) or self._parks.touches(start, end)

    def over(self, parts: Iterable[Part], *, reached: bool = True) -> Iterator[Part]:
        """The parts of a request with these causes in place. `reached`: it came to the scheduler."""
        parts = self._gates.over(parts)
        return self._parks.over(self._pauses.over(parts)) if reached else iter(parts)


class Parked:
    """Times of one kind, in order; they never overlap. `held`: causes that give way to `cause` then."""

    def __init__(
        self, parks: Sequence[Park], cause: Cause = Cause.PARKED, held: frozenset[Cause] = HELD
    ) -> None:
        self._parks = parks
        self._cause = cause
        self._held = held
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
                if last is not None and self._go_together(last, piece):
                    piece = msgspec.structs.replace(last, duration_ns=last.duration_ns + piece.duration_ns)
                elif last is not None:
                    yield last
                last = piece
        if last is not None:
            yield last

    def _cut(self, part: Part) -> Iterator[Part]:
        start, end = part.start_ns, part.end_ns
        at = bisect_right(self._ends, start) if part.cause in self._held else len(self._parks)
        while at < len(self._parks) and self._parks[at].start < end:
            park = self._parks[at]
            begin, until = max(park.start, start), min(park.end, end)
            if begin > start:
                yield _piece(part, start, begin)
            yield Part(begin, until - begin, self._cause, (), park.words)
            start, at = until, at + 1
        if start == part.start_ns:
            yield part
        elif start < end:
            yield _piece(part, start, end)

    def _go_together(self, last: Part, piece: Part) -> bool:
        same = (last.end_ns, last.detail, last.blockers) == (piece.start_ns, piece.detail, piece.blockers)
        return last.cause is piece.cause is self._cause and same


def _piece(part: Part, start: int, end: int) -> Part:
    return Part(start, end - start, part.cause, part.blockers, part.detail, part.bid)
