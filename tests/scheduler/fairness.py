"""What priority scheduling promises, looked at from outside after every plan."""

from __future__ import annotations

from fairness_count import could_be_taken
from rig import Rig

from sgviz.batch.req import Req
from sgviz.events.schema import AdmitOk, RequestRetracted
from sgviz.scheduler.decode import will_finish_by_length


class Fairness:
    """Call `look` when a turn has been planned; raises AssertionError where a promise is broken."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._seen = 0

    def look(self) -> None:
        rules = self._rig.state.limits.priorities
        admitted, retracted = self._news()
        preempted = [body for body in retracted if body.preempted_by]
        if not rules.enabled:
            assert not preempted
            return
        self._nobody_was_passed(admitted)
        for victim in preempted:
            winner = self._of(victim.preempted_by)
            assert victim.preempted_by in admitted, "somebody was sent back for nothing"
            loser = self._of(victim.rid)
            assert self._better_by(winner, loser) > rules.threshold and rules.preempts
            assert not loser.kv.req_pool_idx and loser.kv.node is None
        waiting = self._rig.state.waiting_queue
        # what was retracted for this very decode step, after the queue was tried, counts in the next turn
        if not admitted and waiting and len(retracted) == len(preempted):
            self._nobody_could_have_made_way(waiting[0])

    def _news(self) -> tuple[list[str], list[RequestRetracted]]:
        first, events = self._rig.ring.since(self._seen)
        self._seen = first + len(events)
        bodies = [event.body for event in events]
        admitted = [body.rid for body in bodies if isinstance(body, AdmitOk) and body.need]
        retracted = [body for body in bodies if isinstance(body, RequestRetracted)]
        return admitted, retracted

    def _of(self, rid: str) -> Req:
        return self._rig.state.live[rid]

    def _value(self, req: Req) -> int:
        assert req.priority is not None
        return -req.priority if self._rig.state.limits.priorities.low_first else req.priority

    def _better_by(self, one: Req, other: Req) -> int:
        return self._value(one) - self._value(other)

    def _nobody_was_passed(self, admitted: list[str]) -> None:
        live = self._rig.state.live
        taken = [self._value(live[rid]) for rid in admitted if rid in live]
        waiting = [self._value(req) for req in self._rig.state.waiting_queue]
        assert not taken or not waiting or min(taken) >= max(waiting), (
            "a lower priority was taken before a higher"
        )

    def _nobody_could_have_made_way(self, head: Req) -> None:
        """`head`, the first in line, was not taken: also all that may make way for it would not have helped."""
        state, planner = self._rig.state, self._rig.scheduler.planner
        rules, adder = state.limits.priorities, planner.adder
        if adder is None or planner.adder_iteration != state.trace.iteration:
            return
        able = [
            req
            for req in adder.running
            if rules.preempts
            and self._better_by(head, req) > rules.threshold
            and req.to_finish is None
            and not will_finish_by_length(req)
            and (req.kv.req_pool_idx or req.kv.node is not None)
        ]
        if not able or state.chunked_req is not None or adder.can_run_list:  # a prompt goes on first
            return
        behind = f"{head.rid} waits behind {[req.rid for req in able]}"
        riders = adder.mixed_decode_tokens
        assert not could_be_taken(self._rig, head, able, adder.running, adder.ratio, riders), behind
