"""The limit of the queue, and who leaves it for a newcomer of a higher priority. Mirrors facts 5.3, step 9.

The lowest priority goes and, among equals, the newest. Differs from SGLang: a request that had to go back to the
queue while it ran is not dropped, as its client has begun to read; who waits for a grammar counts too, so a newcomer
that has no place is refused before its grammar is compiled, but nobody leaves for it before it enters the queue.
Imports: batch, messages, events.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.batch.req import Req
from sgviz.events import Reason
from sgviz.messages import FinishReason
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.state import SchedulerState

UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class HasPlace:
    """There is a place for the newcomer."""


@dataclass(frozen=True, slots=True)
class Evicts:
    """There is one if `loser` leaves."""

    loser: Req


@dataclass(frozen=True, slots=True)
class Full:
    """There is none, for this reason."""

    why: str


Place = HasPlace | Evicts | Full


class QueueLimit:
    """Keeps at most `max_queued_requests` newcomers waiting."""

    def __init__(self, state: SchedulerState, ender: RequestEnder) -> None:
        self._state = state
        self._ender = ender

    def verdict(self, priority: int | None) -> Place:
        """What it takes that one more request, of this settled priority, may wait; changes nothing."""
        state, most = self._state, self._state.limits.max_queued_requests
        if most is None or state.num_queued < most:
            return HasPlace()
        loser = self._worst()
        rules = state.limits.priorities
        if loser is None or rules.rank(loser) <= rules.rank_of(priority):
            return Full(f"the queue is full ({most} requests wait); try again later")
        return Evicts(loser)

    def enter(self, req: Req) -> bool:
        """Carry out the verdict on `req`, which is in no queue: it has its place, or one of the two ends with 503."""
        place = self.verdict(req.priority)
        if isinstance(place, Full):
            self._ender.drop(req, "intake", place.why, _unavailable(place.why))
            return False
        if isinstance(place, Evicts):
            message = "the queue is full, and a request of a higher priority came"
            self._ender.take_out(place.loser, message, _unavailable(message), Reason.PRIORITY)
        return True

    def _worst(self) -> Req | None:
        state = self._state
        if not state.limits.priorities.enabled:
            return None
        fresh = [req for req in (*state.waiting_queue, *state.grammar_queue) if not req.retraction_count]
        rank = state.limits.priorities.rank
        return max(
            fresh, key=lambda req: (rank(req), req.time_stats.scheduler_recv, req.arrival), default=None
        )


def _unavailable(message: str) -> FinishReason:
    return FinishReason(
        type="abort", message=message, status_code=UNAVAILABLE, err_type="ServiceUnavailableError"
    )
