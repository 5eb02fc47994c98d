"""Messages into the scheduler: new requests, aborts, control. Mirrors `process_input_requests` (facts 5.2, 5.3).

Simplified: a request that fails the scheduler's own checks is answered at once instead of running as a
one-token prefill. Imports: messages, channel, batch, grammar, events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from sgviz.batch.req import Req
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import Reason, schema
from sgviz.grammar import GrammarCompiler
from sgviz.messages import (
    AbortReq,
    ConfigureTraceReq,
    DebugReq,
    DebugReqOutput,
    DebugStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    ShutdownReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sgviz.messages.generate import most_new_tokens
from sgviz.messages.rids import HEALTH_CHECK_PREFIX
from sgviz.scheduler.announce import Announcer
from sgviz.scheduler.disagg.side import Side, is_probe, one_side_refusal
from sgviz.scheduler.finish import Decode
from sgviz.scheduler.grammar_queue import GrammarQueue
from sgviz.scheduler.queue_limit import Full, QueueLimit
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.sessions import Sessions
from sgviz.scheduler.state import SchedulerState


class Inbox(Protocol):
    """Where messages come from; `sgviz.channel.Receiver` is one."""

    def drain(self, limit: int = ...) -> list[ToScheduler]: ...

    def wait(self, timeout_ms: int) -> bool: ...


class Outbox(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


class Intake:
    """Dispatches each message to its handler."""

    def __init__(
        self,
        state: SchedulerState,
        inbox: Inbox,
        ender: RequestEnder,
        to_tokenizer: Outbox,
        to_detokenizer: Outbox,
        grammars: GrammarCompiler | None,
        grammar_timeout: float,
        decode: Decode,
        side: Side | None = None,
    ) -> None:
        self._state = state
        self._side = side
        self._announcer = Announcer(state.trace)
        self._grammars = GrammarQueue(state, ender, grammars, grammar_timeout, self._enter)
        self._inbox = inbox
        self._ender = ender
        self._queue_limit = QueueLimit(state, ender)
        self._sessions = Sessions(state, ender, to_tokenizer, decode)
        self._to_tokenizer = to_tokenizer
        self._to_detokenizer = to_detokenizer
        self.shutdown = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            TokenizedGenerateReqInput: self._generate,
            TokenizedEmbeddingReqInput: self._generate,
            AbortReq: self._abort,
            FlushCacheReqInput: self._flush,
            GetInternalStateReq: self._internal_state,
            ConfigureTraceReq: self._configure_trace,
            ShutdownReq: self._shutdown,
            DebugReq: self._refuse_debugger,
            **self._sessions.handlers,
        }

    def add_handlers(self, handlers: Mapping[type, Callable[[Any], None]]) -> None:
        """Let somebody else take messages of these types."""
        self._handlers.update(handlers)

    def receive(self) -> int:
        """Handle all messages that are there, and see whose grammar is; never waits. Returns how many messages."""
        messages = self._inbox.drain()
        for message in messages:
            self._handlers[type(message)](message)
        self._grammars.look()
        self._sessions.reap()
        return len(messages)

    def _generate(self, message: TokenizedGenerateReqInput) -> None:
        """Make a Req of it, or refuse it with a reason."""
        state = self._state
        now = state.clock.now()
        probe = message.rid.startswith(HEALTH_CHECK_PREFIX)
        state.taken_ct += not probe
        if probe and not (state.is_fully_idle and state.pause is None):
            state.health_probes += 1
            return
        try:
            turn = self._sessions.turn(message)
        except SgvizError as error:
            self._ender.refuse(message.rid, error.message, error.status, param=error.param)
            return
        if turn is not None:
            message = turn.message
        refusal = self._refusal(message)
        if refusal is not None:
            self._refuse(message, *refusal)
            return
        req = Req(
            rid=message.rid,
            origin_input_ids=message.input_ids,
            sampling_params=message.sampling_params,
            max_new_tokens=self._max_new_tokens(message),
            stream=message.stream,
            return_logprob=message.return_logprob,
            top_logprobs_num=message.top_logprobs_num,
            logprob_start_len=message.logprob_start_len,
            token_ids_logprob=tuple(message.token_ids_logprob or ()),
            custom_logit_processor=message.custom_logit_processor,
            require_reasoning=message.require_reasoning,
            extra_key=message.extra_key,
            priority=state.limits.priorities.settle(message.priority),
            time_stats=message.time_stats,
        )
        if isinstance(message, TokenizedEmbeddingReqInput):
            req.is_embedding, req.dimensions = True, message.dimensions
            req.whole_prompt = state.limits.whole_prompt_embeddings
        req.time_stats.scheduler_recv = now
        if self._side is not None and not is_probe(req.rid):
            try:
                self._side.meet(req, message)
            except BadRequest as error:
                self._ender.refuse(req.rid, error.message, error.status, param=error.param)
                return
        state.live[req.rid] = req
        if turn is not None:
            self._sessions.begin(turn, req)
        self._grammars.take(req)

    def _enter(self, req: Req) -> None:
        """Into the waiting queue, if there is a place in it."""
        if not self._queue_limit.enter(req):
            return
        if self._side is not None and req.transfer is not None:
            self._side.enter(req)
            return
        req.time_stats.wait_queue_entry = self._state.clock.now()
        self._state.enqueue(req)
        self._announcer.entered(req, len(self._state.waiting_queue) - 1)

    def _refuse(
        self, message: TokenizedGenerateReqInput, why: str, status: int, cause: Reason | None
    ) -> None:
        """Answer it, and let the other side know, if it has one."""
        if self._side is not None and message.rid not in self._state.live:
            self._side.turn_away(message, why, status)
        self._ender.refuse(message.rid, why, status, cause)

    def _refusal(self, message: TokenizedGenerateReqInput) -> tuple[str, int, Reason | None] | None:
        """`(message, status, limit it can never keep)` if the request cannot be taken."""
        state, limits = self._state, self._state.limits
        length = len(message.input_ids)
        if message.rid in state.live or state.disagg.drains(message.rid):
            return f"request id {message.rid!r} is already running", 400, None
        if length > limits.max_req_input_len:
            return (
                f"the prompt has {length} tokens; at most {limits.max_req_input_len} fit "
                f"(KV pool {limits.max_total_num_tokens} tokens)",
                400,
                Reason.NEVER_FITS,
            )
        if self._side is not None and (why := one_side_refusal(message)):
            return why, 400, None
        why = limits.priorities.refusal(message.priority)
        if not why:
            place = self._queue_limit.verdict(limits.priorities.settle(message.priority))
            why = place.why if isinstance(place, Full) else ""
        return (why, 503, None) if why else None

    def _max_new_tokens(self, message: TokenizedGenerateReqInput) -> int:
        """The request's limit, clamped so that it fits context and memory when alone."""
        limits = self._state.limits
        most = most_new_tokens(
            len(message.input_ids),
            max_req_len=limits.max_req_len,
            max_total_num_tokens=limits.max_total_num_tokens,
            page_size=limits.page_size,
        )
        wanted = message.sampling_params.max_new_tokens
        return most if wanted is None else min(wanted, most)

    def _abort(self, message: AbortReq) -> None:
        if message.abort_all:
            self._ender.abort_all(message.message)
        else:
            self._ender.abort(message.rid, message.message)

    def _flush(self, message: FlushCacheReqInput) -> None:
        state = self._state
        if state.may_flush and state.cache.flush():
            self._grammars.clear_cache()
            reply = FlushCacheReqOutput(id=message.id, success=True, message="cache flushed")
        else:
            why = (
                f"cache not flushed: {state.num_queued} requests wait and "
                f"{len(state.live) - state.num_queued} run"
            )
            if state.trace.on:
                state.trace.emit(schema.CacheFlushed(ok=False, why=why))
            reply = FlushCacheReqOutput(id=message.id, success=False, message=why)
        self._to_tokenizer.send(reply)

    def _internal_state(self, message: GetInternalStateReq) -> None:
        # through the detokenizer, which adds its own account; the sign goes straight, should that one be silent
        self._to_tokenizer.send(HealthCheckOutput(rid="", forward=False))
        account = {**internal_state(self._state), "num_sessions": len(self._sessions)}
        if self._side is not None:
            account |= self._state.disagg.counts()
        self._to_detokenizer.send(GetInternalStateReqOutput(id=message.id, state=account))

    def _configure_trace(self, message: ConfigureTraceReq) -> None:
        self._state.trace.on = message.on
        self._to_detokenizer.send(message)

    def _refuse_debugger(self, message: DebugReq) -> None:
        """With a gate in front such messages do not come here."""
        error = "no debugger can attach to this scheduler: it was started without enable_debugger"
        self._to_tokenizer.send(DebugReqOutput(id=message.id, status=DebugStatus(), error=error))

    def _shutdown(self, message: ShutdownReq) -> None:
        self._sessions.close_all("the engine stops")
        self._to_detokenizer.send(message)
        self.shutdown = True

    def answer_probe_when_idle(self) -> None:
        """A probe that came while busy and found no result to ride on."""
        state = self._state
        for _ in range(state.health_probes):
            self._to_tokenizer.send(HealthCheckOutput(rid=""))
        state.health_probes = 0


def internal_state(state: SchedulerState) -> dict[str, int | float]:
    """Queue lengths, memory and limits, under SGLang's names where it has one."""
    ledger = state.cache.ledger()
    return {
        "num_running_reqs": state.num_running,
        "num_waiting_reqs": len(state.waiting_queue),
        "num_grammar_queue_reqs": len(state.grammar_queue),
        "num_chunked_reqs": int(state.chunked_req is not None),
        "num_live_reqs": len(state.live),
        "num_paused_reqs": len(state.live) if state.pause is not None else 0,
        "forward_ct": state.forward_ct,
        "new_token_ratio": state.ratio.current,
        "max_total_num_tokens": ledger.total,
        "available_tokens": ledger.free,
        "evictable_tokens": ledger.evictable,
        "protected_tokens": ledger.protected,
        "private_tokens": ledger.private,
        "free_rows": state.cache.req_to_token_pool.available_size(),
        "max_running_requests": state.limits.max_running_requests,
        "max_req_input_len": state.limits.max_req_input_len,
    }
