"""Two recordings on one clock: by the anchors of their processes, and within what cause and effect allow.

On one host the monotonic clock is the same for all processes. Between hosts the calendar joins them, which may be
wrong by the error of both; a piece of KV that arrives before it was sent, or a handshake that ends before it began,
then says so, and bounds the error. SGLang compares no clocks. Imports: events, recording.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.events.schema import ProcessStarted
from sgviz.recording.explanation import plain_ms
from sgviz.recording.recording import Recording
from sgviz.recording.transfers import Transfers

SAME_HOST_NS = 1_000_000  # anchors that agree within this are of one clock


@dataclass(frozen=True, slots=True)
class ClockFit:
    """`t` of the other recording plus `shift_ns` is the time on the first one's clock.

    `uncertainty_ns`: how far it may be off (0: one clock; -1: nothing bounds it). `words`: how it was found.
    """

    shift_ns: int
    uncertainty_ns: int
    words: str


def fit(first: Recording, other: Recording, bounds: tuple[int, int] | None = None) -> ClockFit:
    """The clock of `other` on that of `first`. `bounds`: least and largest shift that cause and effect allow.

    A recording without an anchor is taken to be of the same clock.
    """
    one, two = boot_ns(first), boot_ns(other)
    if one is None or two is None:
        return ClockFit(0, -1, "no anchors: taken to be one clock")
    if abs(two - one) <= SAME_HOST_NS:
        return ClockFit(0, 0, f"one monotonic clock (the anchors agree within {plain_ms(abs(two - one))})")
    shift = two - one
    if bounds is None or bounds[0] > bounds[1]:
        return ClockFit(shift, -1, "two hosts, joined by the calendar; nothing bounds its error")
    low, high = bounds
    moved = min(max(shift, low), high)
    doubt = max(moved - low, high - moved)
    words = f"two hosts, joined by the calendar, at most {plain_ms(doubt)} off by what the transfers allow"
    if moved != shift:
        words += (
            f"; corrected by {plain_ms(abs(moved - shift))}, as the calendar would put effects before causes"
        )
    return ClockFit(moved, doubt, words)


def boot_ns(rec: Recording) -> int | None:
    """Calendar ns at the zero of the recording's monotonic clock; None without an anchor."""
    started = (event.body for event in rec.stamped() if isinstance(event.body, ProcessStarted))
    found = [(body.unix_ns, body.monotonic_ns) for body in started]
    found = found or [(anchor.unix_ns, anchor.monotonic_ns) for anchor in rec.header.anchors]
    return found[0][0] - found[0][1] if found else None


def causal_bounds(prefill: Transfers, decode: Transfers) -> tuple[int, int] | None:
    """Least and largest shift of the decode side's clock: pieces arrive after they are read, and the prefill side
    hears where KV goes after it was decided. None unless both are there."""
    lows: list[int] = []
    highs: list[int] = []
    for one in prefill.all():
        two = decode.of(one.rid)
        if two is None or two.room != one.room:
            continue
        read = {piece.piece: piece.start_ns for piece in one.sent}
        lows += [read[piece.piece] - piece.end_ns for piece in two.received if piece.piece in read]
        if one.bootstrapped and two.preallocated:
            highs.append(one.bootstrapped - two.preallocated)
    return (max(lows), min(highs)) if lows and highs else None
