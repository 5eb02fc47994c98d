"""DetokenizerManager: BatchTokenIDOutput in, BatchStrOutput out, one generator loop between.

Mirrors SGLang's DetokenizerManager; a BatchEmbeddingOutput has no text and is passed on. What is simplified: one
detokenizer, no tokens of tool calls that survive trimming. A fault in one request ends that request (abort, status
500), never the loop. Imports: scheduler (the names of the stops), messages, channel, events.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from sgviz.channel import Receiver, Sender
from sgviz.detokenizer_manager.decoding import Decoded, TextDecoder, Window, decode_windows
from sgviz.detokenizer_manager.status import DecodeStatus
from sgviz.events.clock import Clock
from sgviz.events.schema import TextEmitted
from sgviz.events.tracer import QUIET_MS, Tracer
from sgviz.messages import (
    ActiveRanksOutput,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    ConfigureTraceReq,
    FinishReason,
    GetInternalStateReqOutput,
    ShutdownReq,
    ToDetokenizer,
)
from sgviz.scheduler.stops import Stop

logger = logging.getLogger(__name__)

MAX_STATES = 65536
IDLE_WAIT_MS = 1000


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one request gets out of one message."""

    text: str
    held: int
    finished_reason: FinishReason | None


class DetokenizerManager:
    """Turns ids into text for every request under way.

    Args:
        codec: decodes; ids outside its vocabulary are taken as 0.
        receiver: messages for the detokenizer. sender: to the TokenizerManager.
        max_states: requests remembered; beyond it the oldest is forgotten and ends with an error.
        idle_wait_ms: how long one wait for a message may block.
        ranks: schedulers before it, each of which says when it leaves.
    """

    def __init__(
        self,
        codec: TextDecoder,
        receiver: Receiver[ToDetokenizer],
        sender: Sender,
        trace: Tracer,
        clock: Clock,
        max_states: int = MAX_STATES,
        idle_wait_ms: int = IDLE_WAIT_MS,
        ranks: int = 1,
    ) -> None:
        self._codec = codec
        self._vocab_size = codec.vocab_size
        self._receiver = receiver
        self._sender = sender
        self._trace = trace
        self._clock = clock
        self._max_states = max_states
        self._idle_wait_ms = idle_wait_ms
        self.decode_status: dict[str, DecodeStatus] = {}
        self._stay_for = ranks
        self._lost: frozenset[int] = frozenset()  # membership only

    def run(self) -> None:
        """Drain the loop: what the thread or process of the detokenizer does until a ShutdownReq."""
        for _ in self.event_loop():
            pass

    def event_loop(self) -> Iterator[Stop]:
        """Receive, decode, send; yields at `received`, `processed` and `idle`; the last rank's ShutdownReq ends it.

        Whoever resumes it after `idle` lets it block until a message comes or the wait is over.
        """
        while True:
            messages = self._receiver.drain()
            if not messages:
                self._trace.flush_if_due()
                yield Stop.IDLE
                if not self._receiver.wait(QUIET_MS):  # a short gap between two messages is not worth a flush
                    self._tell_cost()
                    self._trace.flush()
                    self._receiver.wait(self._idle_wait_ms)
                continue
            yield Stop.RECEIVED
            for message in messages:
                if not isinstance(message, ShutdownReq):
                    self.handle(message)
                    continue
                self._stay_for -= 1
                if not self._stay_for:
                    self._tell_cost()
                    self._trace.flush()
                    return
            yield Stop.PROCESSED

    def _tell_cost(self) -> None:
        if self._trace.on:
            self._trace.tell_cost()

    def handle(
        self,
        message: BatchTokenIDOutput
        | BatchEmbeddingOutput
        | GetInternalStateReqOutput
        | ConfigureTraceReq
        | ActiveRanksOutput,
    ) -> None:
        """Do what one message asks for."""
        if isinstance(message, ConfigureTraceReq):
            self._trace.on = message.on
        elif isinstance(message, ActiveRanksOutput):
            self._forget_lost(message)
        elif message.dp_rank in self._lost:
            return  # its last words; whom they were for has ended already
        elif isinstance(message, GetInternalStateReqOutput):
            message.state["num_detokenizer_reqs"] = len(self.decode_status)
            self._sender.send(message)
        elif isinstance(message, BatchEmbeddingOutput):
            self._sender.send(self._stamped(message))
        else:
            self._sender.send(self.detokenize(message))

    def _forget_lost(self, message: ActiveRanksOutput) -> None:
        """Nothing more comes of the requests of lost ranks."""
        self._lost = frozenset(rank for rank, active in enumerate(message.status) if not active)
        states = self.decode_status.items()
        self.decode_status = {rid: state for rid, state in states if state.dp_rank not in self._lost}

    def _stamped(self, batch: BatchEmbeddingOutput) -> BatchEmbeddingOutput:
        """Vectors have no text: passed on, with the time."""
        now, size = self._clock.now(), len(batch.rids)
        for stats in batch.time_stats:
            stats.detokenized = now
        if self._trace.on:
            nothing = (0,) * size
            self._trace.emit(
                TextEmitted(rids=tuple(batch.rids), chars=nothing, held=nothing, finished=(True,) * size)
            )
        return batch

    def detokenize(self, batch: BatchTokenIDOutput) -> BatchStrOutput:
        """The text of every request of `batch`, in its order; finished requests are forgotten."""
        pieces = self._pieces(batch)
        now = self._clock.now()
        for stats in batch.time_stats:
            stats.detokenized = now
        if self._trace.on:
            self._trace.emit(_emitted(batch, pieces))
        return _as_text(batch, pieces)

    def _pieces(self, batch: BatchTokenIDOutput) -> list[_Piece]:
        statuses = [self._extend(batch, i) for i in range(len(batch.rids))]
        known = [(i, status) for i, status in enumerate(statuses) if status is not None]
        decoded = decode_windows(self._codec, [_window(batch, i, status) for i, status in known])
        out = {i: self._settle(batch, i, status, texts) for (i, status), texts in zip(known, decoded)}
        return [out[i] if i in out else self._unknown(batch, i) for i in range(len(batch.rids))]

    def _extend(self, batch: BatchTokenIDOutput, i: int) -> DecodeStatus | None:
        """Append the new ids to the request's state; None if they go on from a state that is gone."""
        rid = batch.rids[i]
        ids = [token if 0 <= token < self._vocab_size else 0 for token in batch.decode_ids[i]]
        # only the first message carries context ids; a state left by an earlier request of that name is stale
        if len(ids) > len(batch.output_ids[i]):
            self.decode_status.pop(rid, None)
            status = self.decode_status[rid] = DecodeStatus(ids, batch.read_offsets[i], dp_rank=batch.dp_rank)
            if len(self.decode_status) > self._max_states:
                del self.decode_status[next(iter(self.decode_status))]
            return status
        known = self.decode_status.get(rid)
        if known is not None:
            known.decode_ids.extend(ids)
        return known

    def _settle(self, batch: BatchTokenIDOutput, i: int, status: DecodeStatus, texts: Decoded) -> _Piece:
        reason = batch.finished_reasons[i]
        if isinstance(texts, Exception):
            return self._fault(batch.rids[i], f"its tokens could not be decoded: {texts}", texts)
        if reason is None:
            text = status.advance(*texts)
            return _Piece(text, status.held, None)
        self.decode_status.pop(batch.rids[i], None)
        stop = reason.matched if isinstance(reason.matched, str) else None
        text = status.finish(*texts, stop, keep_stop=batch.no_stop_trim[i])
        return _Piece(text, 0, reason)

    def _unknown(self, batch: BatchTokenIDOutput, i: int) -> _Piece:
        reason = batch.finished_reasons[i]
        if reason is not None and reason.type == "abort":
            return _Piece("", 0, reason)
        return self._fault(
            batch.rids[i],
            f"the detokenizer no longer knows it (it remembers {self._max_states} requests)",
            None,
        )

    def _fault(self, rid: str, why: str, error: Exception | None) -> _Piece:
        logger.error("request %s ends: %s", rid, why, exc_info=error)
        self.decode_status.pop(rid, None)
        message = f"request {rid} was ended by the detokenizer: {why}"
        reason = FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")
        return _Piece("", 0, reason)


def _window(batch: BatchTokenIDOutput, i: int, status: DecodeStatus) -> Window:
    reason = batch.finished_reasons[i]
    stopped = reason is not None and isinstance(reason.matched, int) and bool(batch.output_ids[i])
    surr, read = status.windows(drop_last=stopped and not batch.no_stop_trim[i])
    return Window(surr, read, (batch.skip_special_tokens[i], batch.spaces_between_special_tokens[i]))


def _emitted(batch: BatchTokenIDOutput, pieces: list[_Piece]) -> TextEmitted:
    return TextEmitted(
        rids=tuple(batch.rids),
        chars=tuple(len(piece.text) for piece in pieces),
        held=tuple(piece.held for piece in pieces),
        finished=tuple(piece.finished_reason is not None for piece in pieces),
    )


def _as_text(batch: BatchTokenIDOutput, pieces: list[_Piece]) -> BatchStrOutput:
    return BatchStrOutput(
        rids=batch.rids,
        finished_reasons=[piece.finished_reason for piece in pieces],
        output_ids=batch.output_ids,
        prompt_tokens=batch.prompt_tokens,
        completion_tokens=batch.completion_tokens,
        cached_tokens=batch.cached_tokens,
        retraction_counts=batch.retraction_counts,
        time_stats=batch.time_stats,
        output_token_logprobs=batch.output_token_logprobs,
        output_top_logprobs=batch.output_top_logprobs,
        output_token_ids_logprobs=batch.output_token_ids_logprobs,
        input_token_logprobs=batch.input_token_logprobs,
        input_top_logprobs=batch.input_top_logprobs,
        input_token_ids_logprobs=batch.input_token_ids_logprobs,
        output_strs=[piece.text for piece in pieces],
        dp_rank=batch.dp_rank,
    )
