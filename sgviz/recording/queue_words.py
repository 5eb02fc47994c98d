"""A wait in the queue as an interval with cause, blockers and numbers: which request for which budget.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sgviz.events.schema import Reason
from sgviz.recording.explanation import Cause, Part
from sgviz.recording.standings import Standings, Stay, Stop

UNITS = {
    Reason.KV: "KV tokens",
    Reason.ROWS: "rows",
    Reason.RUNNING_SLOTS: "running slots",
    Reason.CHUNK_BUDGET: "tokens of the chunk budget",
    Reason.PREFILL_BUDGET: "tokens of the prefill budget",
    Reason.MAX_REQUESTS: "requests in the batch",
}


def queue_part(rid: str, stay: Stay, stop: Stop | None, start: int, end: int, standings: Standings) -> Part:
    """The wait of `rid` from `start` to `end` while `stop` is the last word of planning (None: no word yet)."""
    if stay.retracted is not None:
        return _after_retraction(stay, stop, start, end)
    if stop is None:
        return Part(start, end - start, Cause.PLANNING, (), "nothing was refused; the next plan decides")
    ahead = _overtakers(rid, stay, stop, standings)
    if ahead:
        detail = f"the policy put {_names(ahead)} first, which came later; {budget_words(stop)}"
        return Part(start, end - start, Cause.POLICY_ORDER, ahead, detail)
    if stop.head == rid:
        return Part(start, end - start, Cause(stop.reason.value), holder_rids(stop), budget_words(stop))
    detail = f"behind {stop.head}: {budget_words(stop)}"
    return Part(start, end - start, Cause.HEAD_OF_LINE, (stop.head,), detail)


def holder_rids(stop: Stop) -> tuple[str, ...]:
    return tuple(rid for rid, _ in stop.holders)


def budget_words(stop: Stop) -> str:
    """What was short: `kv: needs 120 KV tokens, 80 to be had; held by r1 (64), r2 (32)`."""
    unit = UNITS.get(stop.reason, "")
    held = ", ".join(f"{rid} ({amount})" for rid, amount in stop.holders)
    numbers = f"needs {stop.need} {unit}, {stop.have} to be had"
    if stop.need < 0 or (stop.need == 1 and stop.have <= 0):
        numbers = f"no {unit} left"
    if stop.reason is Reason.RUNNING_SLOTS:
        numbers = f"{stop.need} would run, {stop.have} may" if stop.have >= 0 else "all running slots taken"
    return f"{stop.reason}: {numbers}" + (f"; held by {held}" if held else "")


def _overtakers(rid: str, stay: Stay, stop: Stop, standings: Standings) -> tuple[str, ...]:
    """Requests that came later and were taken in the same plan, or stand before it."""
    if stop.t < stay.start:  # a word from before it came is no order against it
        return ()
    later = [other for other in stop.admitted if standings.number_of(other, stop.t) > stay.number]
    if stop.head != rid and standings.number_of(stop.head, stop.t) > stay.number:
        later.append(stop.head)
    return tuple(later)


def _after_retraction(stay: Stay, stop: Stop | None, start: int, end: int) -> Part:
    told = stay.retracted
    assert told is not None
    detail = (
        f"memory ran out while decoding ({told.need} KV tokens needed, {told.have} to be had): it gave up its KV "
        f"after {told.output_tokens} output tokens"
    )
    if stop is not None and stop.t >= stay.start:
        detail += f"; {budget_words(stop)}"
        return Part(start, end - start, Cause.RETRACTION, holder_rids(stop) or _survivors(stay), detail)
    return Part(start, end - start, Cause.RETRACTION, _survivors(stay), detail)


def _survivors(stay: Stay) -> tuple[str, ...]:
    return tuple(rid for rid, _ in stay.survivors)


def _names(rids: tuple[str, ...]) -> str:
    return ", ".join(rids[:4]) + (f" and {len(rids) - 4} more" if len(rids) > 4 else "")


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbours with the same cause, blockers and words become one part."""
    last: Part | None = None
    for part in parts:
        if last is not None and (last.cause, last.blockers, last.detail) == (
            part.cause,
            part.blockers,
            part.detail,
        ):
            last = Part(
                last.start_ns, last.duration_ns + part.duration_ns, last.cause, last.blockers, last.detail
            )
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
