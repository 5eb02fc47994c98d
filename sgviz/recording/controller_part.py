"""What the data parallel controller did for a request: its interval, why that rank, and what a lost rank ends.

Mirrors nothing of SGLang, whose controller keeps its reasons to itself. Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

from sgviz.events.schema import DpChose, DpRankChanged, Event
from sgviz.recording.explanation import Cause, Part, counted
from sgviz.recording.requests import Requests, RequestState

UNKNOWN = -1  # requests or tokens of a rank that the policy did not look at
GIVEN = MappingProxyType({"explicit": "the request names it", "session": "its session is there"})
REASONS = MappingProxyType({
    "round_robin": "its turn", "follow_bootstrap_room": "its room leads there", "total_tokens": "the fewest tokens",
    "total_requests": "the fewest requests",
})  # fmt: skip


def chose(requests: Requests, event: Event, body: DpChose) -> None:
    """Note the choice with its request."""
    requests.of(body.rid).marks["dp.chose"] = event


def rank_changed(requests: Requests, event: Event, body: DpRankChanged) -> None:
    """What a lost scheduler had ends with it; all requests are its own, as in the recording of a rank."""
    for state in () if body.active else (*requests.by_rid.values(), *requests.probes.values()):
        sent = state.stats.api_server_dispatch or state.stats.scheduler_recv
        if sent and not state.end and not state.stats.completion:
            state.abort = state.abort or f"rank {body.rank} was lost: {body.why}"
            requests.complete(state, event.t)


def through_controller(parts: Iterable[Part], life: RequestState) -> Iterator[Part]:
    """`parts` of the way into the scheduler, with the controller's own between the two sockets."""
    event = life.marks.get("dp.chose")
    if event is None or not isinstance(event.body, DpChose):
        yield from parts
        return
    words, last, told = choice_words(event.body), 0, False
    for part in parts:
        begins = part.cause not in (Cause.CONVERT, Cause.TOKENIZE, Cause.DISPATCH)
        if begins and not told:
            told = True
            until = min(event.t, part.end_ns)
            if until > part.start_ns:
                yield Part(part.start_ns, until - part.start_ns, Cause.CONTROLLER, (), words)
                if until == part.end_ns:
                    continue
                rest = part.end_ns - until
                part = Part(until, rest, part.cause, part.blockers, part.detail, part.bid, part.side)
        last = part.end_ns
        yield part
    if not told and event.t > last > 0:
        yield Part(last, event.t - last, Cause.CONTROLLER, (), words)


def choice_words(body: DpChose) -> str:
    """Which rank, by what, and what was believed of each at that moment."""
    unused = [rank for rank, active, *_ in body.candidates if not active]
    words = f"rank {body.rank}: {GIVEN[body.policy]}" if body.policy in GIVEN else _by_policy(body)
    return words + (f"; lost or set aside: {', '.join(map(str, unused))}" if unused else "")


def _by_policy(body: DpChose) -> str:
    why = f"{body.policy}, {REASONS[body.policy]}" if body.policy in REASONS else body.policy
    loads = [
        f"rank {rank}: {counted(requests, 'request')}, {counted(tokens, 'token')}"
        for rank, active, requests, tokens in body.candidates
        if active and UNKNOWN not in (requests, tokens)
    ]
    among = f"; {', '.join(loads)}" if loads else f" among {counted(len(body.candidates), 'rank')}"
    return f"rank {body.rank} by {why}{among}"
