"""Applying a policy: order the queue, check what came back, tell what moved.

With priority scheduling the priority goes before the policy, whose order stays among equals. Imports: batch, events.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from sgviz.batch.req import Req
from sgviz.events import Tracer, schema
from sgviz.scheduler.policy import PolicyView, SchedulePolicy, in_order_of_arrival
from sgviz.scheduler.priorities import NO_PRIORITIES, Priorities

log = logging.getLogger(__name__)


def order_queue(
    waiting: list[Req],
    policy: SchedulePolicy,
    view: PolicyView,
    trace: Tracer,
    priorities: Priorities = NO_PRIORITIES,
) -> list[Req]:
    """The queue by priority and then in the policy's order. A policy that raises, drops or doubles a request is
    reported, and the queue goes on in order of arrival."""
    if not waiting:
        return waiting
    name, (ordered, fault) = _name(policy), _asked(waiting, policy, view)
    if fault:
        log.error("schedule policy %s %s; this plan is made in order of arrival", name, fault)
        if trace.on:
            trace.emit(schema.PolicyFailed(policy=name, fault=fault))
        name, ordered = (
            "fcfs",
            in_order_of_arrival(waiting),
        )  # an earlier plan may have left another order behind
    if priorities.enabled:
        name, ordered = f"priority, {name}", list(priorities.in_order(ordered))
    if trace.on and ordered is not waiting:
        moves = _moves(waiting, ordered)
        if moves:
            trace.emit(schema.QueueSorted(policy=name, moves=moves))
    return ordered


def _asked(waiting: list[Req], policy: SchedulePolicy, view: PolicyView) -> tuple[list[Req], str]:
    """The policy's order, and what is wrong with it (an empty string: nothing)."""
    shown = tuple(waiting)  # a policy cannot change the queue by sorting or popping what it is given
    try:
        answer = policy.order(shown, view)
        if answer is shown:
            return waiting, ""
        ordered = list(itertools.islice(answer, len(waiting) + 1))  # an answer may have no end
    except (Exception, SystemExit) as error:  # sys.exit() in a policy is its fault, not the engine's end
        return waiting, f"raised {type(error).__name__}: {error}"
    return ordered, _fault(waiting, ordered)


def _fault(waiting: Sequence[Req], ordered: Sequence[Req]) -> str:
    """What is wrong with the returned order, or an empty string."""
    seen: dict[int, Req] = {}
    for req in ordered:
        if id(req) in seen:
            return f"returned {getattr(req, 'rid', req)!r} twice"
        seen[id(req)] = req
    missing = next((req for req in waiting if id(req) not in seen), None)
    if missing is not None:
        return f"dropped {missing.rid!r}"
    if len(ordered) != len(waiting):
        return f"returned {len(ordered)} requests of {len(waiting)}"
    return ""


def _name(policy: SchedulePolicy) -> str:
    """Its name; a user's object without one goes by its class."""
    return str(getattr(policy, "name", type(policy).__name__))


def _moves(before: Sequence[Req], after: Sequence[Req]) -> tuple[tuple[str, int, int], ...]:
    old = {id(req): rank for rank, req in enumerate(before)}
    return tuple((req.rid, old[id(req)], rank) for rank, req in enumerate(after) if old[id(req)] != rank)
