"""OverlapRules: when the overlap loop may not simply run ahead. Mirrors facts 5.4, steps 3 and 6.

Two exceptions, each for one batch: its sampling waits for the result before it (delayed sampling, for requests under
a grammar, which needs the last token on the host), or the result before it is processed before it is launched.
Imports: batch, config, scheduler.
"""

from __future__ import annotations

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.config import ScheduleConfig
from sgviz.scheduler.launched import Launched


class OverlapRules:
    """The rules that follow from the settings."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self._no_consecutive_prefill = schedule.disable_consecutive_prefill_overlap

    def needs_last_token(self, req: Req) -> bool:
        """The next token of `req` can be chosen only by who has seen its last one: it is under a grammar."""
        return req.grammar is not None

    def must_delay_sample(self, batch: ScheduleBatch) -> bool:
        """A member that needs its last token is launched while that token is under way (its own forward is counted)."""
        return any(req.inflight > 1 and self.needs_last_token(req) for req in batch.reqs)

    def must_process_first(self, pending: Launched, batch: ScheduleBatch | None) -> bool:
        """Two prefills follow each other and the settings want the first one's tokens out before the second runs.

        Not where decoding requests ride along: those of the first would end, and lose their memory, under the
        second, which has been planned with them.
        """
        return (
            self._no_consecutive_prefill
            and batch is not None
            and batch.forward_mode.is_extend
            and not batch.decode_rows
            and pending.batch.forward_mode.is_extend
        )
