"""Preemption: running requests make way for a waiting one of a higher priority. Mirrors `preempt_to_schedule` (5.10).

The worst priority goes first and, among equals, the newest; nobody is sent back unless that admits the
newcomer. Differs from SGLang: a victim counts for all the memory that it gives back, not only for the tokens it was
promised, none is taken that turns out not to be needed, and a prompt that is being cut makes way too.
Imports: batch, cache, events.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from sgviz.batch.req import Req
from sgviz.events import schema
from sgviz.scheduler.decode import will_finish_by_length
from sgviz.scheduler.prefill_adder import PrefillAdder
from sgviz.scheduler.retraction import send_back
from sgviz.scheduler.state import SchedulerState
from sgviz.scheduler.supposition import Supposition

log = logging.getLogger(__name__)


class Preemption:
    """Decides who makes way, and sends them back."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._best_victim: int | None = None

    def begin(self) -> None:
        """A new plan: nobody has been sent back in it."""
        self._best_victim = None

    def goes_behind(self, req: Req) -> bool:
        """Whether somebody of a higher priority than `req` was sent back in this plan: the room left is not for it."""
        best = self._best_victim
        return best is not None and best < self._state.limits.priorities.rank(req)

    def make_way(self, adder: PrefillAdder, req: Req, slots: int) -> bool:
        """Send running requests back so that `adder` admits `req` next; if that cannot be, nothing changes.

        `slots`: how many requests the batch being planned may hold.
        """
        candidates = self._candidates(req)
        if not candidates:
            return False
        least = max(1, len(adder.can_run_list) + 1 - slots)
        return self._try(adder, req, candidates, least)

    def chunk_makes_way(self, adder: PrefillAdder, req: Req, slots: int) -> bool:
        """Send the prompt that is being cut back if it would use up the budget that `req` needs.

        Asked before the chunk is planned. What of it has been computed stays in the prefix cache.
        """
        state = self._state
        chunked = state.chunked_req
        if chunked is None or not state.limits.priorities.can_preempt(req, chunked):
            return False
        if adder.leaves_budget_after(chunked):
            return False
        least = 1 + max(0, 1 - slots)  # it holds none of the running slots
        return self._try(adder, req, [chunked, *self._candidates(req)], least, fixed=1)

    def _candidates(self, req: Req) -> list[Req]:
        """Who may be sent back for `req`: the worst priority first, and the newest of those."""
        rules = self._state.limits.priorities
        able = [other for other in self._state.running_batch.reqs if rules.can_preempt(req, other)]
        free = [other for other in able if other.to_finish is None and not will_finish_by_length(other)]
        free.sort(key=lambda other: (-rules.rank(other), -other.arrival))
        return free

    def _try(
        self, adder: PrefillAdder, req: Req, candidates: Sequence[Req], least: int, fixed: int = 0
    ) -> bool:
        """Send back as few as it takes, `least` at least and the first `fixed` among them; says whether it did."""
        state = self._state
        match = state.cache.match(req.fill_ids(), req.namespace, req.max_prefix_len)
        with state.cache.held(match.node):
            victims = fewest(Supposition(adder, req, match), candidates, least, fixed)
            need, have = adder.need_of(req, match), math.ceil(adder.rem_total)
        adder.forget(victims)
        for victim in victims:
            self._send_back(victim, req, need, have)
        return bool(victims)

    def _send_back(self, victim: Req, req: Req, need: int, have: int) -> None:
        state = self._state
        log.info("request %s makes way for %s (priority %s)", victim.rid, req.rid, req.priority)
        rank = state.limits.priorities.rank(victim)
        self._best_victim = rank if self._best_victim is None else min(rank, self._best_victim)
        ratio = state.ratio.current
        told = schema.RequestRetracted(
            rid=victim.rid, output_tokens=len(victim.output_ids), need=need, have=have, ratio_before=ratio,
            ratio_after=ratio, preempted_by=req.rid,
        )  # fmt: skip
        send_back(state, victim, told)
        batch = state.running_batch
        batch.reqs = [other for other in batch.reqs if other is not victim]
        batch.batch_is_full = False
        if victim is state.chunked_req:
            state.chunked_req = None


def fewest(supposed: Supposition, candidates: Sequence[Req], least: int, fixed: int) -> list[Req]:
    """The first candidates that make room, less those who turn out not to be needed; or nobody.

    Args:
        supposed: of the request that needs room, with nobody gone. least: so many must go in any case.
        fixed: so many of the first are not spared.
    """
    if not _first_that_do(supposed, candidates, least):
        return []
    for spared in reversed(supposed.gone[fixed:]):
        if len(supposed.gone) == least:
            break
        supposed.spare(spared)
        if not supposed.would_take():
            supposed.without(spared)
    return [victim for victim in candidates if supposed.is_gone(victim)]


def _first_that_do(supposed: Supposition, candidates: Sequence[Req], least: int) -> bool:
    """Suppose the fewest first candidates gone that make room, `least` at least; False if all together do not."""
    for victim in candidates:
        supposed.without(victim)
    if len(candidates) < least or not supposed.would_take():
        return False
    for victim in candidates:
        supposed.spare(victim)
    for number, victim in enumerate(candidates, start=1):
        supposed.without(victim)
        if number >= least and supposed.would_take():
            break
    return True
