"""Who goes first by priority. Mirrors `enable_priority_scheduling` and its settings (facts 5.3, 5.7, 5.10).

A rank turns the two directions into one: the smaller it is, the sooner the request runs. Simplified: a
request without a priority gets its default here and not in the TokenizerManager, which does not schedule.
Imports: batch, config.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sgviz.batch.req import Req
from sgviz.config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """The rules that follow from the settings; as made without arguments, priorities mean nothing.

    Attributes:
        low_first: a smaller value goes first. default: of requests that bring none; None: behind all others.
        refuse_when_off: a request that brings a priority is refused while `enabled` is False.
        preempts: a waiting request may send running ones back that are worse by more than `threshold`.
        retract_lowest: memory that runs out while decoding is taken from the lowest priority.
    """

    enabled: bool = False
    low_first: bool = False
    default: int | None = None
    refuse_when_off: bool = False
    preempts: bool = False
    threshold: int = 10
    retract_lowest: bool = False

    @classmethod
    def of(cls, schedule: ScheduleConfig) -> Priorities:
        on = schedule.enable_priority_scheduling
        return cls(
            enabled=on,
            low_first=schedule.schedule_low_priority_values_first,
            default=schedule.default_priority_value,
            refuse_when_off=schedule.abort_on_priority_when_disabled,
            preempts=on and not schedule.disable_priority_preemption,
            threshold=schedule.priority_scheduling_preemption_threshold,
            retract_lowest=on and schedule.retraction_policy == "priority",
        )

    def settle(self, given: int | None) -> int | None:
        """The priority a request runs under; None where they mean nothing."""
        if not self.enabled:
            return None
        value = self.default if given is None else given
        if value is None:
            return sys.maxsize if self.low_first else -sys.maxsize
        return value

    def refusal(self, given: int | None) -> str:
        """Why a request that brings this priority is not taken, or an empty string."""
        if given is None or self.enabled or not self.refuse_when_off:
            return ""
        return f"priority {given} was given, but priority scheduling is off (enable_priority_scheduling)"

    def rank(self, req: Req) -> int:
        """0 for all while priorities mean nothing."""
        return self.rank_of(req.priority)

    def rank_of(self, priority: int | None) -> int:
        if priority is None:
            return 0
        return priority if self.low_first else -priority

    def in_order(self, reqs: Sequence[Req]) -> Sequence[Req]:
        """Best rank first; among equals the order stays."""
        return sorted(reqs, key=self.rank) if self.enabled else reqs

    def can_preempt(self, req: Req, running: Req) -> bool:
        """Whether `req` is better than `running` by more than the threshold."""
        return self.preempts and self.rank(running) - self.rank(req) > self.threshold


NO_PRIORITIES = Priorities()
