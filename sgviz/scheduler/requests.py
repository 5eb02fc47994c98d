"""Ending requests outside the result of a forward: drops, aborts, refusals. Imports: batch, cache, messages, errors.

Every request that ends gets exactly one final message. One that has no output yet is answered straight
to the TokenizerManager by an AbortReq; one that has some sends what is left of it on the normal way, so
that the client gets its text and the detokenizer's state goes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgviz.batch.req import Req
from sgviz.errors import from_status
from sgviz.events import Reason, schema
from sgviz.messages import AbortReq, FinishReason, HealthCheckOutput
from sgviz.scheduler.output_streamer import OutputStreamer
from sgviz.scheduler.state import SchedulerState


class ToTokenizerManager(Protocol):
    """Where control replies go."""

    def send(self, message: AbortReq | HealthCheckOutput) -> None: ...


class RequestEnder:
    """Takes requests out of the scheduler before their time."""

    def __init__(
        self, state: SchedulerState, streamer: OutputStreamer, to_tokenizer: ToTokenizerManager
    ) -> None:
        self._state = state
        self._streamer = streamer
        self._to_tokenizer = to_tokenizer

    def drop(
        self,
        req: Req,
        where: str,
        why: str,
        reason: FinishReason | None = None,
        *,
        cause: Reason | None = None,
    ) -> None:
        """End a request that is not in a forward: give back its memory and send the final message.

        `cause`: the limit it can never keep, if that is why.
        """
        state = self._state
        if req.transfer is not None:
            req.transfer.abort(why, (reason.status_code if reason is not None else None) or 500)
        if req.kv.req_pool_idx or req.kv.node is not None:
            state.give_back(req, "abort")
        state.running_batch.batch_is_full = False
        req.finished_reason = reason or aborted(why)
        req.time_stats.completion = state.clock.now()
        state.live.pop(req.rid, None)
        if state.trace.on:
            state.trace.emit(schema.RequestAborted(rid=req.rid, where=where, why=why, reason=cause))
        if req.output_ids:
            self._streamer.stream_output([req])
        else:
            req.finished_output = True  # a late result that it is a member of must not send it again
            self._to_tokenizer.send(AbortReq(rid=req.rid, finished_reason=req.finished_reason))

    def take_out(self, req: Req, why: str, reason: FinishReason, cause: Reason) -> None:
        """End a request that waits, for a batch or for a grammar."""
        state = self._state
        where = "grammar" if any(other is req for other in state.grammar_queue) else "waiting"
        state.waiting_queue = [other for other in state.waiting_queue if other is not req]
        state.grammar_queue = [other for other in state.grammar_queue if other is not req]
        self.drop(req, where, why, reason, cause=cause)

    def refuse(
        self, rid: str, message: str, status_code: int, cause: Reason | None = None, param: str | None = None
    ) -> None:
        """Answer a request that never became one.

        `cause`: the limit it can never keep, if that is why. `param`: the field at fault, if one is.
        """
        kind = from_status(status_code, message).type
        reason = FinishReason(
            type="abort", message=message, status_code=status_code, err_type=kind, param=param
        )
        if self._state.trace.on:
            self._state.trace.emit(schema.RequestAborted(rid=rid, where="intake", why=message, reason=cause))
        self._to_tokenizer.send(AbortReq(rid=rid, finished_reason=reason))

    def abort(self, rid: str, why: str) -> None:
        """End exactly `rid`, wherever it is; an unknown rid is ignored."""
        req = self._state.live.get(rid)
        if req is not None:
            self._abort_these([req], why)

    def fail(self, req: Req, why: str, status_code: int = 500) -> None:
        """End `req`, wherever it is, with an error."""
        kind = from_status(status_code, why).type
        reason = FinishReason(type="abort", message=why, status_code=status_code, err_type=kind)
        self._abort_these([req], why, reason)

    def abort_all(self, why: str) -> None:
        """End every live request; the queue is gone through once, however long it is."""
        self._abort_these(list(self._state.live.values()), why)

    def _abort_these(self, reqs: Sequence[Req], why: str, reason: FinishReason | None = None) -> None:
        state = self._state
        meant = set(map(id, reqs))  # membership only, never iterated
        waiting = {id(req) for req in state.waiting_queue if id(req) in meant}
        if waiting:
            state.waiting_queue = [req for req in state.waiting_queue if id(req) not in waiting]
        compiling = {id(req) for req in state.grammar_queue if id(req) in meant}
        if compiling:
            state.grammar_queue = [req for req in state.grammar_queue if id(req) not in compiling]
        where = dict.fromkeys(waiting, "waiting") | dict.fromkeys(compiling, "grammar")
        where |= state.disagg.take_out(meant)
        for req in reqs:
            if req is state.chunked_req:
                state.chunk_aborted, req.to_finish = why, req.to_finish or reason
            elif id(req) in where:
                self.drop(req, where[id(req)], why, reason)
            elif req.to_finish is None:
                req.to_finish = reason or aborted(why)
                if state.trace.on:
                    state.trace.emit(schema.RequestAborted(rid=req.rid, where="running", why=why))


def aborted(why: str) -> FinishReason:
    """A normal ending by abort: no status code, the client gets the text so far."""
    return FinishReason(type="abort", message=why or "Aborted")
