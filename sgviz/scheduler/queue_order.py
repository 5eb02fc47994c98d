"""Applying a policy: order the queue, check what came back, tell what moved. Imports: batch, events."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from sgviz.batch.req import Req
from sgviz.events import Tracer, schema
from sgviz.scheduler.policy import PolicyView, SchedulePolicy, in_order_of_arrival

log = logging.getLogger(__name__)


def order_queue(waiting: list[Req], policy: SchedulePolicy, view: PolicyView, trace: Tracer) -> list[Req]:
    """The queue in the policy's order. A policy that raises, drops or doubles a request is reported, and
    the queue goes on in order of arrival."""
    if not waiting:
        return waiting
    shown = tuple(waiting)  # a policy cannot change the queue by sorting or popping what it is given
    try:
        answer = policy.order(shown, view)
        if answer is shown:
            return waiting
        ordered = list(itertools.islice(answer, len(waiting) + 1))  # an answer may have no end
    except Exception as error:
        return _failed(waiting, policy, f"raised {type(error).__name__}: {error}", trace)
    fault = _fault(waiting, ordered)
    if fault:
        return _failed(waiting, policy, fault, trace)
    if trace.on:
        moves = _moves(waiting, ordered)
        if moves:
            trace.emit(schema.QueueSorted(policy=_name(policy), moves=moves))
    return ordered


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


def _failed(waiting: list[Req], policy: SchedulePolicy, fault: str, trace: Tracer) -> list[Req]:
    log.error("schedule policy %s %s; this plan is made in order of arrival", _name(policy), fault)
    if trace.on:
        trace.emit(schema.PolicyFailed(policy=_name(policy), fault=fault))
    arrived = in_order_of_arrival(waiting)  # an earlier plan may have left another order behind
    if trace.on and (moves := _moves(waiting, arrived)):
        trace.emit(schema.QueueSorted(policy="fcfs", moves=moves))
    return arrived


def _name(policy: SchedulePolicy) -> str:
    """Its name; a user's object without one goes by its class."""
    return str(getattr(policy, "name", type(policy).__name__))


def _moves(before: Sequence[Req], after: Sequence[Req]) -> tuple[tuple[str, int, int], ...]:
    old = {id(req): rank for rank, req in enumerate(before)}
    return tuple((req.rid, old[id(req)], rank) for rank, req in enumerate(after) if old[id(req)] != rank)
