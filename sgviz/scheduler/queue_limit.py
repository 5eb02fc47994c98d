"""The limit of the queue, and who leaves it for a newcomer of a higher priority. Mirrors facts 5.3, step 9.

The lowest priority goes and, among equals, the newest. Differs from SGLang: a request that had to go back to the
queue while it ran is not dropped, as its client has begun to read. Imports: batch, messages, events.
"""

from __future__ import annotations

from sgviz.batch.req import Req
from sgviz.events import Reason
from sgviz.messages import FinishReason
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.state import SchedulerState


class QueueLimit:
    """Keeps at most `max_queued_requests` newcomers waiting."""

    def __init__(self, state: SchedulerState, ender: RequestEnder) -> None:
        self._state = state
        self._ender = ender

    def refusal(self, priority: int | None) -> str:
        """Why one more request, which brings this priority, is not taken; or an empty string.

        Takes a worse one out of the queue if it must, which ends with 503; so this is asked last.
        """
        state, most = self._state, self._state.limits.max_queued_requests
        if most is None or state.num_queued < most:
            return ""
        loser = self._worst()
        rules = state.limits.priorities
        if loser is None or rules.rank(loser) <= rules.rank_of(rules.settle(priority)):
            return f"the queue is full ({most} requests wait); try again later"
        self._drop(loser)
        return ""

    def _worst(self) -> Req | None:
        state = self._state
        if not state.limits.priorities.enabled:
            return None
        fresh = [req for req in (*state.waiting_queue, *state.grammar_queue) if not req.retraction_count]
        rank = state.limits.priorities.rank
        return max(
            fresh, key=lambda req: (rank(req), req.time_stats.scheduler_recv, req.arrival), default=None
        )

    def _drop(self, req: Req) -> None:
        message = "the queue is full, and a request of a higher priority came"
        reason = FinishReason(
            type="abort", message=message, status_code=503, err_type="ServiceUnavailableError"
        )
        self._ender.take_out(req, message, reason, Reason.PRIORITY)
