"""TokenizerManager: the engine's face in the main process's asyncio loop.

Mirrors SGLang's TokenizerManager. What is simplified: no LoRA. All methods belong to one event loop:
from another thread use `call_soon_threadsafe` or `run_coroutine_threadsafe`.
Imports: messages, channel, errors, events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from sgviz.channel import Sender
from sgviz.errors import SgvizError, Unavailable
from sgviz.events.clock import Clock
from sgviz.events.schema import ResponseFinished
from sgviz.events.tracer import Tracer
from sgviz.messages import (
    ActiveRanksOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
)
from sgviz.messages.generate import new_rid
from sgviz.messages.workers import AbortBroadcastReq, GivenUp
from sgviz.tokenizer_manager.batch import RequestRun
from sgviz.tokenizer_manager.codec import TextCodec
from sgviz.tokenizer_manager.control_desk import ControlDesk
from sgviz.tokenizer_manager.crew import Crew, NoCrew
from sgviz.tokenizer_manager.deadlines import Deadlines
from sgviz.tokenizer_manager.debug_desk import DebugDesk
from sgviz.tokenizer_manager.engine_time import EngineTime
from sgviz.tokenizer_manager.flow import Flow
from sgviz.tokenizer_manager.follower import Follower
from sgviz.tokenizer_manager.merge import accounts, merged
from sgviz.tokenizer_manager.meta import Output, OutputBuilder
from sgviz.tokenizer_manager.ranks import Ranks
from sgviz.tokenizer_manager.receive import Incoming, ResultReceiver
from sgviz.tokenizer_manager.replies import Replies
from sgviz.tokenizer_manager.request_log import RequestLog, live_request
from sgviz.tokenizer_manager.session_desk import SessionDesk
from sgviz.tokenizer_manager.signs import DETOKENIZER
from sgviz.tokenizer_manager.state import Limits, ReqState
from sgviz.tokenizer_manager.table import RequestTable
from sgviz.tokenizer_manager.tasks import probe
from sgviz.tokenizer_manager.tokenize import Preparer
from sgviz.tokenizer_manager.wait import IsDisconnected, Waiter
from sgviz.tokenizer_manager.weights import Weights

logger = logging.getLogger(__name__)

ABORTED_BY_CALLER = "the request was aborted by its caller"
REPLY_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 20.0


class TokenizerManager:
    """Takes requests, gives answers.

    Args:
        codec: tokenizer. sender: to the scheduler. receiver: from scheduler and detokenizer.
        limits: what a prompt and its output must fit into.
        clock: source of the stamps; None: the tracer's.
        unix_offset_ns: calendar time minus that clock; None: as the wall clock has it.
        weights: those that the engine begins with.
        request_timeout: seconds after which a request ends with 503; None: never.
        request_log: writes lines about requests; None: nothing is logged of them.
        crew: tokenizer workers that this one leads. is_worker: it is one, so pauses are told by its leader, and it
            tells the router of requests that it gives up.
        ranks: the schedulers, if there are several.
        on_failure: told why when nothing can be received any more, after every waiter got its error.
    """

    def __init__(
        self,
        *,
        codec: TextCodec,
        sender: Sender,
        receiver: Incoming,
        trace: Tracer,
        limits: Limits,
        clock: Clock | None = None,
        unix_offset_ns: int | None = None,
        on_failure: Callable[[str], None] | None = None,
        request_timeout: float | None = None,
        weights: Weights | None = None,
        request_log: RequestLog | None = None,
        crew: Crew | None = None,
        is_worker: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self._crew = crew = crew or NoCrew()
        self._log = request_log or RequestLog()
        self.limits = limits
        self._on_failure = on_failure
        self._sender = sender
        self._trace = trace
        self._clock = clock = clock or trace.clock
        weights = weights or Weights()
        self._table = RequestTable(sender=sender, trace=trace, clock=clock)
        self._preparer = Preparer(codec, limits)
        self._builder = OutputBuilder(unix_offset_ns, weights)
        self._time = EngineTime()
        request_time = EngineTime(self._time)
        self._flow = Flow(Tracer(trace.component, None) if is_worker else trace, clock, request_time)
        self._flow.elsewhere = lambda: crew.live
        self.follower = Follower(self._table, self._flow, weights, trace)
        self._table.on_end = self._flow.note
        self._table.on_give_up = self._tell_given_up if is_worker else None
        self._deadlines = (
            Deadlines(self._table, request_time, request_timeout) if request_timeout is not None else None
        )
        self._loop_task: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self._open_desks(weights)
        self._results = ResultReceiver(
            receiver=receiver, table=self._table, replies=self._replies, desk=self.debug, codec=codec,
            trace=trace, clock=clock, ranks=self.ranks,
        )  # fmt: skip

    def _open_desks(self, weights: Weights) -> None:
        """Where questions are put to the scheduler, by subject."""
        self._replies = Replies(self._sender, self._time, self.ranks)
        self.sessions = SessionDesk(self._replies, self.start)
        self.debug = DebugDesk(self._sender, self._replies, self._time)
        self.control = ControlDesk(
            self._sender, self._replies, self._table, self._flow, weights, self._trace, self.start,
            lambda: self._refusal, self._crew,
        )  # fmt: skip

    @property
    def rid_to_state(self) -> dict[str, ReqState]:
        """The live requests."""
        return self._table.rid_to_state

    @property
    def last_receive_tstamp(self) -> int:
        """When the newest message of any kind came, ns on the manager's clock."""
        return self._results.signs.newest

    def live_requests(self) -> list[dict[str, Any]]:
        """Of every live request: what was asked (long texts in part), how far it is, for how long it has lived."""
        now = self._clock.now()
        own = [live_request(state, now) for state in self.rid_to_state.values()]
        return own + self._crew.live_requests()

    def start(self) -> None:
        """Start receiving on the running loop; done by the first request if not before."""
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._results.handle_loop())
            self._loop_task.add_done_callback(self._on_loop_end)

    async def close(self) -> None:
        """Stop receiving; whoever still waits gets an error. The sockets stay with their owner."""
        self.fail_all("the engine was closed")
        if self._deadlines is not None:
            self._deadlines.close()
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def generate_request(
        self, obj: GenerateReqInput, is_disconnected: IsDisconnected | None = None
    ) -> AsyncGenerator[Output | list[Output], None]:
        """The answers to `obj`, each `{"text", "output_ids", "meta_info"}` with text and ids so far.

        Streaming yields whatever arrives next, with `index` = prompt_no * n + sample_no where there are
        several answers. Otherwise it yields once: a dict, or the list of all answers in order of `index`.
        An answer that the engine ended carries a finish_reason of type abort, with a `status_code` of 400 to
        599 if that is an error. Leaving the iterator early aborts what is still running.

        Raises:
            BadRequest: the request cannot be done; nothing was sent.
            Unavailable: no new requests are taken.
            ClientDisconnected: `is_disconnected` said so; the request was aborted.
        """
        waiter = Waiter(is_disconnected)
        run = self._run(obj, waiter)
        entry = self._log.opened(obj)
        failure: BaseException | None = None
        try:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            self.start()
            await run.launch()
            async with aclosing(run.outputs()) as outputs:
                async for output in outputs:
                    if entry is not None:
                        entry.note(output)
                    yield output
        except BaseException as error:
            failure = error
            run.leave(error)
            raise
        finally:
            if entry is not None:
                entry.closed(failure)
            waiter.close()
            run.close()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End the request `rid` and whatever it fanned out into, or all of them.

        Exactly that name: requests whose name begins alike run on. Unknown, empty and repeated names do
        nothing. The answer ends with finish_reason abort and the text so far.
        """
        self._crew.tell(AbortBroadcastReq(rid=rid, abort_all=abort_all, message=ABORTED_BY_CALLER))
        if abort_all:
            self._table.abort_all(ABORTED_BY_CALLER)
        elif rid:
            self._table.abort(rid, ABORTED_BY_CALLER)

    async def flush_cache(self, timeout: float = REPLY_TIMEOUT_S) -> FlushCacheReqOutput:
        """Empty the prefix cache; refused (`success` False) while requests are under way."""
        self.start()
        reply = await self._replies.ask(FlushCacheReqInput(id=new_rid()), timeout)
        assert isinstance(reply, FlushCacheReqOutput)
        return reply

    async def get_internal_state(self, timeout: float = REPLY_TIMEOUT_S) -> GetInternalStateReqOutput:
        """The engine's account of itself: queue lengths, pool counts, limits, and who knows how many requests.

        Of several ranks it is the sum, and `ranks` has the account of each, with why it is lost if it is.

        Raises:
            Unavailable: it did not answer in time.
        """
        self.start()
        start, signs = self._clock.now(), self._results.signs
        try:
            parts = await self._replies.ask_each(GetInternalStateReq(id=new_rid()), timeout)
        except Unavailable:
            if self._refusal is None and signs.silent_since(start) == DETOKENIZER:
                why = f"the detokenizer did not pass on the scheduler's answer within {timeout:g} s"
                raise Unavailable(why) from None
            raise
        reply = merged(list(parts.values()))
        assert isinstance(reply, GetInternalStateReqOutput)
        if self.ranks.size > 1:
            reply.state["ranks"] = accounts(parts, self.ranks)
        reply.state["num_tokenizer_manager_reqs"] = len(self.rid_to_state) + self._crew.live
        reply.state["parked"] = self.debug.status.parked  # by a debugger: time limits stand still
        return reply

    async def health_generate(self, timeout: float = HEALTH_TIMEOUT_S) -> str | None:
        """Probe the pipeline with one token and a question; what comes meanwhile proves life as well.

        Returns:
            None if all stages were heard within `timeout` seconds (parked time not counted), else the silent one.
        """
        if self._refusal is not None:
            return "engine"
        self.start()
        start, signs = self._clock.now(), self._results.signs
        self._sender.send(probe(self.limits, start))
        self._sender.send(GetInternalStateReq(id=new_rid()))  # heard straight and by the detokenizer
        with suppress(TimeoutError):
            await self._time.wait_for(signs.all_since(start), timeout)
        return signs.silent_since(start) if self._refusal is None else "engine"

    def lose_rank(self, rank: int, why: str) -> None:
        """A data parallel rank died, others live: its requests end with 503, nothing waits for it or goes to it."""
        self.ranks.lost[rank] = why
        self.ranks.aside.pop(rank, None)
        reason = self.ranks.why_ended(rank)
        ended = self._table.fail_rank(rank, reason) + self._crew.fail_rank(rank, reason)
        self._replies.lose(rank)
        self.debug.lose(rank)
        self._results.signs.lose(rank)
        ranks = self.ranks
        self._sender.send(ActiveRanksOutput(status=ranks.status, why=why, requests=ended, aside=ranks.aside))

    def fail_all(self, message: str, status: int = 503) -> None:
        """The engine is gone: every waiter gets an abort with `status`, and no new request is taken."""
        self.refuse_new(message)
        kind = Unavailable.type if status == Unavailable.status else SgvizError.type
        self._table.fail_all(FinishReason(type="abort", message=message, status_code=status, err_type=kind))
        self._replies.fail_all(Unavailable(message))
        self.debug.fail(Unavailable(message))
        self._results.signs.give_up()

    def refuse_new(self, reason: str) -> None:
        """From now on new requests raise Unavailable(reason); those under way go on."""
        self._refusal = reason
        self._flow.refuse(reason)

    async def drained(self, timeout: float) -> bool:
        """Wait until no request is live; says whether that was so within `timeout` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._table.drained(), timeout)
        return self._table.is_empty

    def response_sent(self, rid: str, status: int) -> None:
        """The last byte of the answer to `rid` was handed over, or its client found gone (499)."""
        if self._trace.on:
            self._trace.emit(ResponseFinished(rid=rid, status=status))

    def _run(self, obj: GenerateReqInput, waiter: Waiter) -> RequestRun:
        return RequestRun(
            obj,
            waiter,
            table=self._table,
            flow=self._flow,
            preparer=self._preparer,
            builder=self._builder,
            trace=self._trace,
            clock=self._clock,
        )

    def _tell_given_up(self, state: ReqState) -> None:
        self._sender.send(GivenUp(rid=state.rid, created=state.stats.created))

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("receiving from the engine failed", exc_info=error)
        why = f"receiving from the engine failed: {type(error).__name__}: {error}"
        self.fail_all(why)
        if self._on_failure is not None:
            self._on_failure(why)
