"""What a request of a prefill or decode server waited for beside the waiting queue: intervals with causes and numbers.

Imports: recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sgviz.recording.explanation import Cause, Part, counted
from sgviz.recording.transfers import DECODE, PREFILL, NoRoom, Transfers, TransferState

UNITS = {"kv": "KV tokens", "rows": "rows"}


def transfer_parts(all_: Transfers, state: TransferState, t_end: int) -> Iterator[Part]:
    """The intervals of `state` that no batch and no waiting queue explains, in order; they do not overlap."""
    over = state.over or t_end
    yield from _part(state.queued, state.bootstrapped or over, Cause.BOOTSTRAP, _bootstrap_words(state))
    if state.side == DECODE:
        yield from _decode_parts(all_, state, over)
    elif state.computed:
        yield from _settled(state, state.computed, over)
        yield from _part(over, state.ended, Cause.PROCESSING, "its KV is given back, and its end told")


def laid_over(parts: Iterable[Part], over: Sequence[Part], start: int, end: int) -> list[Part]:
    """The parts with those of `over` (in order, disjoint) in place of what lies under them, between the two moments."""
    if not over:
        return list(parts)
    clipped = [piece for part in over if (piece := cut(part, start, end)) is not None]
    out = list(clipped)
    for part in parts:
        at, end_of = part.start_ns, part.end_ns
        for top in clipped:
            if top.end_ns <= at or top.start_ns >= end_of:
                continue
            if (piece := cut(part, at, top.start_ns)) is not None:
                out.append(piece)
            at = max(at, top.end_ns)
        if (piece := cut(part, at, end_of)) is not None:
            out.append(piece)
    return sorted(out, key=lambda part: part.start_ns)


def cut(part: Part, start: int, end: int) -> Part | None:
    """What of the part lies between two moments; None if nothing does."""
    begin, until = max(part.start_ns, start), min(part.end_ns, end)
    if until <= begin:
        return None
    return Part(begin, until - begin, part.cause, part.blockers, part.detail, part.bid, part.side)


def size_words(count: float) -> str:
    """`512 B`, `12.3 kB`, `4.56 MB`, `1.2 GB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def carried_words(state: TransferState, travelled_ns: int = 0) -> str:
    """What travelled: `1.2 MB in 3 pieces over shm, 800 MB/s from the first send until all was in place`.

    `travelled_ns`: how long that took, if both sides are known; else as long as this side saw of it.
    """
    out = state.outcome
    pieces = out.pieces if out is not None else len(state.pieces)
    words = f"{size_words(state.bytes)} in {counted(pieces, 'piece')}"
    words += f" over {out.backend}" if out is not None and out.backend else ""
    rate = state.bytes * 1e9 / travelled_ns if travelled_ns else state.rate
    words += f", {size_words(rate)}/s from the first send until all was in place" if rate else ""
    return words + (f"; it failed: {out.why}" if out is not None and not out.ok else "")


def _part(start: int, end: int, cause: Cause, detail: str, blockers: tuple[str, ...] = ()) -> Iterator[Part]:
    if end > start:
        yield Part(start, end - start, cause, blockers, detail)


def _bootstrap_words(state: TransferState) -> str:
    if state.side == PREFILL:
        return f"room {state.room}: the decode server has not told yet where the KV goes"
    return f"room {state.room}: where the prefill server is, is asked at {state.peer}"


def _decode_parts(all_: Transfers, state: TransferState, over: int) -> Iterator[Part]:
    met = state.bootstrapped
    if not met:
        return
    reserved = state.preallocated or over
    yield from _no_room(all_, state, met, reserved)
    if not state.preallocated:
        return
    first = min((piece.start_ns for piece in state.received), default=0)
    begins = min(max(first, reserved), over) if first else over
    taken = state.room_taken
    prefix = f", {taken.prefix_len:,} of them in its cache already" if taken and taken.prefix_len else ""
    words = f"row and pages for {taken.tokens if taken else 0:,} tokens are taken{prefix}; no KV has come yet"
    yield from _part(reserved, begins, Cause.AWAITS_KV, words)
    if first:
        yield from _settled(state, begins, over)


def _settled(state: TransferState, start: int, over: int) -> Iterator[Part]:
    """From the transfer to the turn of the loop that noticed its end."""
    words = carried_words(state)
    if state.side == PREFILL:
        early = [piece for piece in state.sent if piece.start_ns < state.computed]
        words += f"; {counted(len(early), 'piece')} left before the prompt was whole" if early else ""
    in_place = min(max(state.in_place, start), over) if state.in_place else over
    yield from _part(start, in_place, Cause.TRANSFER, words)
    yield from _part(in_place, over, Cause.LOOP, "all KV is in place; the scheduler sees it at its next look")


def _no_room(all_: Transfers, state: TransferState, start: int, end: int) -> Iterator[Part]:
    """The prealloc queue, cut where the reason of the wait changes."""
    at = start
    for number, stop in enumerate(all_.stops):
        until = all_.stops[number + 1].t if number + 1 < len(all_.stops) else end
        until = min(until, end, _relieved(all_, stop) or end)
        begin = max(stop.t, at)
        if until <= begin or stop.t >= end:
            continue
        yield from _part(at, begin, Cause.PREALLOC, "room for it is looked for at the scheduler's next look")
        blockers, words = _stop_words(state.rid, stop)
        yield from _part(begin, until, Cause.PREALLOC, words, blockers)
        at = until
    yield from _part(at, end, Cause.PREALLOC, "room for it is looked for at the scheduler's next look")


def _relieved(all_: Transfers, stop: NoRoom) -> int:
    """When the request that had no room had it, or gave up (0: not yet)."""
    head = all_.of(stop.body.rid, 0, stop.t)
    return (head.preallocated or head.over) if head is not None else 0


def _stop_words(rid: str, stop: NoRoom) -> tuple[tuple[str, ...], str]:
    body = stop.body
    if body.reason == "retracted":
        words = "requests that gave up their KV go first"
    else:
        words = f"needs {body.need:,} {UNITS.get(body.reason, body.reason)}, {body.have:,} to be had"
    holders = tuple(owner for owner, _ in stop.holders if owner and owner != rid)
    if body.reason == "kv" and stop.holders:
        words += "; held by " + ", ".join(
            f"{owner or 'somebody'} ({tokens:,})" for owner, tokens in stop.holders
        )
    if body.rid != rid:
        return (body.rid,), f"behind {body.rid}: {body.reason}: {words}"
    return holders, words
