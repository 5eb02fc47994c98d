"""A wait in the queue as an interval with cause, blockers and numbers: which request for which budget.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sgviz.events.schema import Reason, RequestRetracted
from sgviz.recording.explanation import Cause, Part, counted
from sgviz.recording.queue_sums import sent_back_for
from sgviz.recording.standings import Stay, Stop, budget_words


def queue_part(rid: str, stay: Stay, stop: Stop | None, start: int, end: int) -> Part:
    """The wait of `rid` from `start` to `end` while `stop` is the last word of planning (None: no word yet)."""
    if stay.retracted is not None:
        return _after_retraction(rid, stay, stop, start, end)
    if stop is None:
        return Part(start, end - start, Cause.PLANNING, (), "nothing was refused; the next plan decides")
    ahead = _overtakers(rid, stay, stop)
    if ahead:
        priorities = dict(stop.priorities)
        higher = tuple(other for other in ahead if priorities.get(other) != stay.priority)
        if higher:
            detail = f"priority puts {_names(higher)} first, which came later; {stop.reason}: {stop.words}"
            return Part(start, end - start, Cause.PRIORITY, higher, detail)
        detail = f"the policy put {_names(ahead)} first, which came later; {stop.reason}: {stop.words}"
        return Part(start, end - start, Cause.POLICY_ORDER, ahead, detail)
    if stop.head == rid:
        return Part(start, end - start, Cause(stop.reason.value), _others(rid, holder_rids(stop)), stop.words)
    if stop.passes(stay):
        return _passed_over(rid, stop, start, end)
    detail = f"behind {stop.head}: {stop.reason}: {stop.words}"
    return Part(start, end - start, Cause.HEAD_OF_LINE, (stop.head,), detail)


def _passed_over(rid: str, stop: Stop, start: int, end: int) -> Part:
    """The batch is of the other kind than this request, or than the one before it."""
    words = budget_words(Reason.OTHER_KIND, -1, -1, stop.batch_holders)
    if stop.passed == rid:
        holders = _others(rid, tuple(other for other, _ in stop.batch_holders))
        return Part(start, end - start, Cause.OTHER_KIND, holders, words)
    detail = f"behind {stop.passed}: {Reason.OTHER_KIND}: {words}"
    return Part(start, end - start, Cause.HEAD_OF_LINE, (stop.passed,), detail)


def _others(rid: str, rids: tuple[str, ...]) -> tuple[str, ...]:
    """Nobody waits for himself."""
    return tuple(other for other in rids if other != rid)


def holder_rids(stop: Stop) -> tuple[str, ...]:
    return tuple(rid for rid, _ in stop.holders)


def _overtakers(rid: str, stay: Stay, stop: Stop) -> tuple[str, ...]:
    """Requests that came later and were taken in the same plan, or stand before it."""
    if (
        not stop.sorted or stop.latest <= stay.number or stop.t < stay.start
    ):  # from before it came: not against it
        return ()
    if stop.passes(stay):  # whom the batch took is of the other kind, and not before it in any line
        return (stop.passed,) if stop.passed != rid and stop.passed_number > stay.number else ()
    later = [other for other, number in zip(stop.admitted, stop.numbers) if number > stay.number]
    if stop.head != rid and stop.number > stay.number:
        later.append(stop.head)
    return tuple(later)


def _after_retraction(rid: str, stay: Stay, stop: Stop | None, start: int, end: int) -> Part:
    told = stay.retracted
    assert told is not None
    cause, detail = sent_back_for(told), _why_sent_back(told)
    if stop is not None and stop.t >= stay.start:
        detail += f"; {stop.reason}: {stop.words}"
        holders = _others(rid, holder_rids(stop)) or _survivors(stay)
        return Part(start, end - start, cause, holders, detail)
    blockers = (told.preempted_by,) if told.preempted_by else _survivors(stay)
    return Part(start, end - start, cause, blockers, detail)


def _why_sent_back(told: RequestRetracted) -> str:
    gave_up = f"it gave up its KV after {counted(told.output_tokens, 'output token')}"
    if told.preempted_by:
        return f"preempted by {told.preempted_by}, which has a higher priority: {gave_up}"
    if told.paused:
        return f"generation was paused (mode retract): {gave_up}"
    numbers = f"{told.need:,} KV tokens needed, {told.have:,} to be had"
    return f"memory ran out while decoding ({numbers}): {gave_up}"


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
