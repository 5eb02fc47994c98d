"""Sending a request that runs back to the queue. Mirrors `release_req` and `reset_for_retract` (facts 5.11).

Used by whoever decides that it must be: decoding that finds no memory, preemption, a pause.
Imports: batch, cache, events.
"""

from __future__ import annotations

from sgviz.batch.req import Req
from sgviz.events import schema
from sgviz.scheduler.state import SchedulerState


def send_back(state: SchedulerState, req: Req, told: schema.RequestRetracted) -> None:
    """Put a request that runs behind all that wait, without its KV; `told` says why, before anything is done."""
    if state.trace.on:
        state.trace.emit(told)
    give_up_kv(state, req)
    requeue(state, req)


def give_up_kv(state: SchedulerState, req: Req) -> None:
    """Its KV and its row are free again; outputs and streaming offsets stay. A result under way will not count."""
    state.give_back(req, "retract")
    req.reset_for_retract()


def requeue(state: SchedulerState, req: Req) -> None:
    """Put a request that gave up its KV behind all that wait, or behind those whose KV is kept in host memory."""
    req.requeued_ns = state.clock.now()
    if req.kept_kv is None:
        state.enqueue(req)
    else:
        state.disagg.retracted.append(req)
    if not state.trace.on:
        return
    state.trace.emit(
        schema.QueueEntered(
            rid=req.rid,
            position=len(state.waiting_queue if req.kept_kv is None else state.disagg.retracted) - 1,
            prompt_tokens=len(req.origin_input_ids),
            max_new_tokens=req.max_new_tokens,
            stream=req.stream,
            again=True,
            priority=req.priority,
        )
    )
