"""A request through the types that carry it, and where its time went. Imports: recording, viz.causes."""

from __future__ import annotations

from sgviz.errors import NotFound
from sgviz.recording import Explanation, Recording
from sgviz.recording.requests import Requests, RequestState
from sgviz.viz.causes import LOOKS
from sgviz.viz.views.models import CausePart, JourneyStep, JourneyView

RIDS = 60
PARTS = 200


def ranked(requests: Requests) -> list[str]:
    """Rids to choose from: those that live, slowest so far first; then those that ended, newest first."""
    known = [each for each in requests.by_rid.values() if each.phases]
    live = sorted((each for each in known if not each.end), key=lambda each: each.stats.created)
    over = sorted((each for each in known if each.end), key=_ended, reverse=True)
    return [each.rid for each in [*over[:1], *live[: RIDS // 2], *over[1:]]][:RIDS]


def _ended(request: RequestState) -> int:
    return request.end


def journey_view(rec: Recording, rid: str) -> JourneyView:
    """The journey as far as it went; empty for a rid that the recording does not have."""
    try:
        steps, explanation = rec.journey(rid), rec.explain(rid)
    except NotFound:
        return JourneyView(rid="", steps=(), parts=(), total_ms=0.0, done=False, text="", rids=())
    return JourneyView(
        rid=rid,
        steps=tuple(
            JourneyStep(
                type=step.type, component=step.component, pid=step.pid, t_ms=step.t_ms, holds=step.holds
            )
            for step in steps
        ),
        parts=_parts(explanation),
        total_ms=explanation.total_ns / 1e6,
        done=explanation.done,
        text=explanation.text(),
        rids=(),
    )


def _parts(explanation: Explanation) -> tuple[CausePart, ...]:
    """The stretches; of very many the longest, in their order."""
    stretches = explanation.stretches()
    longest = {id(part) for part in sorted(stretches, key=lambda part: -part.duration_ns)[:PARTS]}
    return tuple(
        CausePart(
            start_ms=(part.start_ns - explanation.start_ns) / 1e6, length_ms=part.duration_ns / 1e6,
            cause=part.cause.value, colour=LOOKS[part.cause][0], detail=part.detail, blockers=part.blockers[:8],
        )
        for part in stretches
        if id(part) in longest
    )  # fmt: skip
