"""The time of a stay in the queue by cause, without the words: for tables of many requests.

Gives what adding up the parts of `queue_words` gives, without making them: behind one stop after another a request
stands for the same reason, so only the stops at itself are looked at. Where a policy sorted the queue every stop
counts, and the parts are the way. Mirrors nothing of SGLang.

Imports: events, recording.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType

from sgviz.events.schema import Reason, RequestRetracted
from sgviz.recording.explanation import Cause
from sgviz.recording.standings import Standings, Stay

Sums = dict[Cause, int]
CAUSES: Mapping[Reason, Cause] = MappingProxyType({reason: Cause(reason.value) for reason in Reason})


def add(sums: Sums, cause: Cause, ns: int) -> None:
    """Nothing for no time."""
    if ns > 0:
        sums[cause] = sums.get(cause, 0) + ns


def sent_back_for(told: RequestRetracted) -> Cause:
    """What a request waits for that had to go back to the queue."""
    return Cause.PRIORITY if told.preempted_by else Cause.RETRACTION


def stay_sums(standings: Standings, rid: str, stay: Stay, taken: int, end: int) -> Sums | None:
    """Nanoseconds by cause from the stay's start to `end`; `taken`: from then on it was being planned.

    None where a sorted queue has to be looked at stop by stop.
    """
    sums: Sums = {}
    start = stay.start
    if stay.retracted is not None:
        add(sums, sent_back_for(stay.retracted), end - start)
        return sums
    if stay.planned_in == stay.iteration:
        add(sums, Cause.PLANNING, end - start)
        return sums
    add(sums, Cause.PLANNING, end - taken)
    if taken <= start:
        return sums
    first, last = standings.stops_of(stay, taken)
    if first >= last:
        add(sums, Cause.PLANNING, taken - start)
        return sums
    if standings.sorted_stops[last] > standings.sorted_stops[first]:
        return None
    told = max(start, min(standings.stops[first].t, taken))
    add(sums, Cause.PLANNING, told - start)
    add(sums, Cause.HEAD_OF_LINE, taken - told - _at_itself(standings, rid, first, last, start, taken, sums))
    return sums


def _at_itself(
    standings: Standings, rid: str, first: int, last: int, start: int, end: int, sums: Sums
) -> int:
    """The time in which the stops were at `rid`, which goes to their own reasons."""
    heads, stops, whole = standings.heads.get(rid, []), standings.stops, 0
    for place in range(bisect_left(heads, first), bisect_left(heads, last)):
        at = heads[place]
        until = min(stops[at + 1].t, end) if at + 1 < last else end
        ns = until - max(stops[at].t, start)
        if ns > 0:
            cause = CAUSES[stops[at].reason] if stops[at].head == rid else Cause.OTHER_KIND
            add(sums, cause, ns)
            whole += ns
    return whole
