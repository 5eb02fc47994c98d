"""The receiving loop: messages from scheduler and detokenizer update states and wake their waiters.

Mirrors `handle_loop` and `_handle_batch_output` of SGLang's TokenizerManager. What is simplified: no
metrics. Imports: messages, channel, errors, events.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from sgviz.errors import SgvizError
from sgviz.events.clock import Clock
from sgviz.events.schema import OutputReceived
from sgviz.events.tracer import Tracer
from sgviz.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    DebugReqOutput,
    FinishReason,
    FlowReply,
    FlushCacheReqOutput,
    GetInternalStateReqOutput,
    OutputColumns,
    RoutedReq,
    SessionReply,
    ToTokenizer,
)
from sgviz.tokenizer_manager.codec import TextCodec
from sgviz.tokenizer_manager.debug_desk import DebugDesk
from sgviz.tokenizer_manager.logprobs import LogprobReader
from sgviz.tokenizer_manager.ranks import Ranks
from sgviz.tokenizer_manager.replies import Replies
from sgviz.tokenizer_manager.signs import SignsOfLife
from sgviz.tokenizer_manager.state import ReqState
from sgviz.tokenizer_manager.table import RequestTable

logger = logging.getLogger(__name__)

BATCH_NOTIFY_SIZE = 16  # waiters woken before others get a turn
ABORTED_IN_QUEUE = "the request was aborted while it waited in the scheduler's queue"


class Incoming(Protocol):
    """Where messages come from: the socket, or what takes some of them for itself before."""

    async def recv(self) -> ToTokenizer: ...


class ResultReceiver:
    """Takes what comes back; `signs` say when anything came, and from whom."""

    def __init__(
        self,
        *,
        receiver: Incoming,
        table: RequestTable,
        replies: Replies,
        desk: DebugDesk,
        codec: TextCodec,
        trace: Tracer,
        clock: Clock,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._receiver = receiver
        self._table = table
        self._replies = replies
        self._desk = desk
        self._logprobs = LogprobReader(codec)
        self._trace = trace
        self._clock = clock
        self.signs = SignsOfLife(clock, ranks.size)

    async def handle_loop(self) -> None:
        """Receive for ever."""
        while True:
            message = await self._receiver.recv()
            self.signs.note(message)
            await self._handle(message)
            self._trace.flush()

    async def _handle(self, message: ToTokenizer) -> None:
        if isinstance(message, BatchStrOutput | BatchEmbeddingOutput):
            await self._handle_batch_output(message)
        elif isinstance(message, AbortReq):
            self._handle_abort(message)
        elif isinstance(message, FlushCacheReqOutput | GetInternalStateReqOutput | FlowReply | SessionReply):
            self._replies.answer(message)
        elif isinstance(message, RoutedReq):
            self._handle_routed(message)
        elif isinstance(message, DebugReqOutput):
            self._desk.take(message)
        # a HealthCheckOutput has done its work by arriving

    async def _handle_batch_output(self, batch: OutputColumns) -> None:
        rows = [(i, state) for i in range(len(batch.rids)) if (state := self._state(batch, i)) is not None]
        if self._trace.on and rows:
            tokens = tuple(len(batch.output_ids[i]) for i, _ in rows)
            self._trace.emit(OutputReceived(rids=tuple(state.rid for _, state in rows), tokens=tokens))
        for i, state in rows:
            self._update(state, batch, i)
        for start in range(0, len(rows), BATCH_NOTIFY_SIZE):
            if start:
                await asyncio.sleep(0)
            for _, state in rows[start : start + BATCH_NOTIFY_SIZE]:
                state.wake()

    def _state(self, batch: OutputColumns, i: int) -> ReqState | None:
        """Whom row `i` is for; None if that request has ended here already."""
        state = self._table.rid_to_state.get(batch.rids[i])
        created = batch.time_stats[i].created
        # a row of an earlier request of the same rid: stamps travel there and back unchanged
        stale = state is not None and bool(created) and created != state.stats.created
        return None if stale else state

    def _update(self, state: ReqState, batch: OutputColumns, i: int) -> None:
        """Put row `i` into its state; a row that does not fit ends its request and no other."""
        try:
            self._absorb(state, batch, i)
            reason = batch.finished_reasons[i]
        except Exception as error:
            logger.exception("the output of request %s could not be handled", state.rid)
            why = f"the engine's output for request {state.rid} could not be handled: {error}"
            reason = FinishReason(type="abort", message=why, status_code=500, err_type=SgvizError.type)
        if reason is not None:
            self._table.finish(state, reason)
            if reason.status_code == 500:  # perhaps a fault behind the scheduler, which runs on
                self._table.stop_engine_side(state)

    def _absorb(self, state: ReqState, batch: OutputColumns, i: int) -> None:
        state.take_stats(batch.time_stats[i])
        state.dp_rank = batch.dp_rank
        if batch.output_ids[i] and not state.stats.first_token:
            state.stats.first_token = self._clock.now()
        if isinstance(batch, BatchStrOutput):
            self._absorb_text(state, batch, i)
        elif isinstance(batch, BatchEmbeddingOutput):
            state.embedding = batch.embeddings[i]
        state.prompt_tokens = batch.prompt_tokens[i]
        state.completion_tokens = batch.completion_tokens[i]
        state.cached_tokens = batch.cached_tokens[i]
        state.num_retractions = batch.retraction_counts[i]

    def _absorb_text(self, state: ReqState, batch: BatchStrOutput, i: int) -> None:
        state.append_text(batch.output_strs[i])
        state.output_ids.extend(batch.output_ids[i])
        if state.obj.return_logprob:
            self._logprobs.add(state.logprobs, batch, i, with_text=state.obj.return_text_in_logprobs)

    def _handle_abort(self, message: AbortReq) -> None:
        """The scheduler took the request from a queue before it ran."""
        state = self._table.rid_to_state.get(message.rid)
        if state is None:
            return
        why = message.message or ABORTED_IN_QUEUE
        self._table.finish(state, message.finished_reason or FinishReason(type="abort", message=why))
        state.wake()

    def _handle_routed(self, message: RoutedReq) -> None:
        """Note who has which request; what a lost rank got before that was known ends as the others it had."""
        for rid, created, rank in zip(message.rids, message.created, message.dp_ranks):
            state = self._table.rid_to_state.get(rid)
            if state is None or state.stats.created != created:
                continue
            state.dp_rank = rank
            if rank in self._ranks.lost:
                self._table.finish(state, self._ranks.why_ended(rank))
                state.wake()
