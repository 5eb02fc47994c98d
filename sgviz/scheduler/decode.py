"""Decode planning and retraction. Mirrors `update_running_batch` and `retract_decode` (facts 5.11).

When the next position of every running request does not fit, requests are retracted: fewest generated
tokens first and, among equals, the longest prompt (with retraction_policy "priority" the lowest priority before
that); one always stays, and the prompt that is being cut goes before that one is given up (SGLang would abort it).
Imports: batch, cache, messages, events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.events import schema
from sgviz.messages import FinishReason
from sgviz.scheduler.new_token_ratio import RETRACT_DECODE_STEPS
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.retraction import give_up_kv, requeue
from sgviz.scheduler.state import SchedulerState

log = logging.getLogger(__name__)


class DecodePlanner:
    """Plans one more token for every running request.

    Args:
        keep: saves the KV of a request that is about to be retracted; None: it will be computed again.
    """

    def __init__(
        self, state: SchedulerState, ender: RequestEnder, keep: Callable[[Req], None] | None = None
    ) -> None:
        self._state = state
        self._ender = ender
        self._keep = keep

    def next_batch(self) -> ScheduleBatch | None:
        """The running batch with one new slot each, or None if nothing can decode now."""
        state = self._state
        batch = self._still_decoding()
        if batch.is_empty:
            return None
        if self._fits(batch.reqs):
            state.ratio.decay()
        elif state.pending_results and any(req.inflight and _ends_next(req) for req in state.live.values()):
            return None  # memory comes with the result that is under way
        elif not self.retract_decode(batch):
            return None
        batch.prepare_for_decode(state.cache, state.take_bid())
        return batch

    def can_ride_along(self) -> bool:
        """Whether the running requests fit into a mixed batch (which never retracts)."""
        batch = self._still_decoding()
        return not batch.is_empty and self._fits(batch.reqs)

    def _still_decoding(self) -> ScheduleBatch:
        """The running batch without those that end with a result under way."""
        batch = self._state.running_batch
        before = len(batch)
        batch.filter_batch(lambda req: not will_finish_by_length(req))
        if len(batch) < before:
            batch.batch_is_full = False
        return batch

    def _fits(self, reqs: Sequence[Req]) -> bool:
        """Room for one more position each, evicting from the tree if it must be."""
        return self._state.cache.ensure(self._need(reqs))

    def _need(self, reqs: Sequence[Req]) -> int:
        return self._state.cache.extend_need(reqs, [req.kv.allocated + 1 for req in reqs])

    def retract_decode(self, batch: ScheduleBatch) -> bool:
        """Shrink the batch until it fits; says whether anything is left of it."""
        state = self._state
        order = sorted(batch.reqs, key=self._keeping)
        victims: list[tuple[Req, int, int]] = []
        while not self._fits(order):
            need, have = self._need(order), state.cache.room()
            victim = self._next_victim(order)
            if victim is None:
                break
            if victim.to_finish is not None:  # it was being aborted anyway
                self._ender.drop(victim, "running", victim.to_finish.message or "", victim.to_finish)
                continue
            victims.append((victim, need, have))
            if self._keep is not None:
                self._keep(victim)
            give_up_kv(state, victim)
        kept = set(map(id, order))  # membership only
        batch.reqs = [req for req in batch.reqs if id(req) in kept]
        batch.batch_is_full = False
        self._requeue(victims, order)
        state.cache.ensure(RETRACT_DECODE_STEPS * len(order))
        if not self._fits(batch.reqs):
            if state.disagg.transfer or state.disagg.draining:
                return False  # who arrives now runs soon, and can be retracted then
            self._abort_last(batch)
        return bool(batch.reqs)

    def _keeping(self, req: Req) -> tuple[int, int, int]:
        """Who is kept comes first."""
        rules = self._state.limits.priorities
        rank = rules.rank(req) if rules.retract_lowest else 0
        return rank, -len(req.output_ids), len(req.origin_input_ids)

    def _next_victim(self, order: list[Req]) -> Req | None:
        """The last in `order`, which loses it; when only one is left there, the prompt that is being cut."""
        if len(order) > 1:
            return order.pop()
        chunked, self._state.chunked_req = self._state.chunked_req, None
        return chunked

    def _requeue(self, victims: Sequence[tuple[Req, int, int]], survivors: Sequence[Req]) -> None:
        if not victims:
            return
        state = self._state
        before = state.ratio.current
        after = state.ratio.after_retraction([(len(req.output_ids), req.max_new_tokens) for req in survivors])
        log.warning(
            "KV full: retracted %d requests, new_token_ratio %.3f -> %.3f", len(victims), before, after
        )
        for req, need, have in victims:
            told = schema.RequestRetracted(
                rid=req.rid, output_tokens=len(req.output_ids), need=need, have=have, ratio_before=before,
                ratio_after=after,
            )  # fmt: skip
            if state.trace.on:
                state.trace.emit(told)
            requeue(state, req)

    def _abort_last(self, batch: ScheduleBatch) -> None:
        """The only request left does not fit alone."""
        for req in batch.reqs:
            message = (
                f"request {req.rid} needs more KV memory than the pool of "
                f"{self._state.cache.total} tokens has left ({self._state.cache.room()})"
            )
            reason = FinishReason(
                type="abort", message=message, status_code=500, err_type="InternalServerError"
            )
            self._ender.drop(req, "retract", message, reason)
        batch.reqs = []


def will_finish_by_length(req: Req) -> bool:
    """The tokens under way bring it to its limit: another forward would be for nothing."""
    return req.inflight > 0 and len(req.output_ids) + req.inflight >= req.max_new_tokens


def _ends_next(req: Req) -> bool:
    return will_finish_by_length(req) or req.to_finish is not None
