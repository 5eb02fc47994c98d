"""What a forward's result does to the requests. Mirrors `process_batch_result` (facts 8.1, 8.2).

Works the same right after the launch (normal loop) and one step late (overlap loop): a member that
finished or was retracted since the launch is skipped, its token dropped, its memory not touched twice.
Imports: batch, cache, worker protocol, messages, events.
"""

from __future__ import annotations

from sgviz.batch.forward_mode import ForwardMode
from sgviz.batch.grammar import Failure
from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.events import schema
from sgviz.messages import FinishReason, HealthCheckOutput
from sgviz.scheduler.disagg.side import HandOver
from sgviz.scheduler.embedding_output import take_embedding
from sgviz.scheduler.finish import Decode, finish_reason
from sgviz.scheduler.launched import Launched
from sgviz.scheduler.output_streamer import OutputStreamer
from sgviz.scheduler.requests import ToTokenizerManager
from sgviz.scheduler.state import SchedulerState
from sgviz.worker.protocol import BatchResult, EmbeddingBatchResult, GenerationBatchResult, ProcessorFailure

FLOAT32_BYTES = 4


class ResultProcessor:
    """Appends tokens, ends requests, returns memory, sends output."""

    def __init__(
        self,
        state: SchedulerState,
        streamer: OutputStreamer,
        to_tokenizer: ToTokenizerManager,
        decode: Decode,
        hand_over: HandOver | None = None,
    ) -> None:
        self._state = state
        self._hand_over = hand_over
        self._streamer = streamer
        self._to_tokenizer = to_tokenizer
        self._decode = decode

    def process(self, launched: Launched, result: BatchResult, wait_ns: int) -> None:
        """Put `result`, waited for since `wait_ns`, into the requests of the launch it belongs to."""
        state, batch = self._state, launched.batch
        self._emit_finished(result, wait_ns)
        if isinstance(result, EmbeddingBatchResult):
            ended = self._put_embeddings(launched, result)
        else:
            valid = [launched.still_valid(i) for i in range(len(batch))]
            ended = self._put_tokens(batch, valid, result)
        if state.trace.on:
            state.trace.emit(schema.BatchProcessed(bid=batch.bid, finished=tuple([req.rid for req in ended])))
        self._streamer.stream_output([req for req in batch.reqs if _may_stream(req, batch)])
        self._answer_probes(state)

    def process_prebuilt(self, batch: ScheduleBatch, found: GenerationBatchResult | None) -> None:
        """A batch that nothing was computed for: `found` by another server, or None for requests that go on."""
        if found is not None:
            for req in batch.reqs:
                req.inflight += 1
            self._put_tokens(batch, [True] * len(batch), found)
        ended = tuple([req.rid for req in batch.reqs if req.finished])
        if self._state.trace.on:
            self._state.trace.emit(schema.BatchProcessed(bid=batch.bid, finished=ended))
        self._streamer.stream_output(batch.reqs)

    def _put_embeddings(self, launched: Launched, result: EmbeddingBatchResult) -> list[Req]:
        """The vectors into the requests, which end with them; those that ended."""
        batch, trace = launched.batch, self._state.trace
        taken: list[Req] = []
        for i, req in enumerate(batch.reqs):
            if req is batch.chunked_req or not launched.still_valid(i):
                continue
            req.inflight -= 1
            if not req.finished:
                has_it = take_embedding(req, result.embeddings[i], self._state.clock.now())
                if has_it:
                    taken.append(req)
                self._settle(req, batch, i, sound=has_it)
        if trace.on:
            dims = tuple([len(req.embedding) // FLOAT32_BYTES for req in taken])
            rids = tuple([req.rid for req in taken])
            trace.emit(schema.EmbeddingsPooled(bid=batch.bid, rids=rids, dims=dims))
        return [req for req in batch.reqs if req.finished and not req.finished_output]

    def _put_tokens(
        self, batch: ScheduleBatch, valid: list[bool], result: GenerationBatchResult
    ) -> list[Req]:
        """The tokens into the requests (the `valid` ones); those that ended."""
        taken: list[Req] = []
        tokens: list[int] = []
        for i, req in enumerate(batch.reqs):
            if not valid[i]:
                continue
            if result.input_logprobs is not None and (part := result.input_logprobs[i]) is not None:
                req.input_logprobs.extend(part)
            if req is batch.chunked_req:
                if self._hand_over is not None and req.transfer is not None:
                    self._hand_over.computed(req, batch.seq_lens[i])
                continue
            req.inflight -= 1
            if req.finished:
                continue
            if self._append(req, i, result):
                taken.append(req)
                tokens.append(result.next_token_ids[i])
            self._settle(req, batch, i, sound=i not in result.nan_members)
        self._state.generated_ct += len(tokens)
        self._emit_sampled(batch.bid, taken, tokens)
        return [req for req in batch.reqs if req.finished and not req.finished_output]

    def _append(self, req: Req, i: int, result: GenerationBatchResult) -> bool:
        """Take the new token unless the request is being aborted, wants none, or its grammar does not let it."""
        req.time_stats.prefill_finished = req.time_stats.prefill_finished or self._state.clock.now()
        if req.to_finish is not None:
            req.finished_reason = req.to_finish
            return False
        if i in result.failures:
            req.finished_reason = _processor_failed(req, result.failures[i])
            return False
        if i in result.nan_members:
            req.finished_reason = _not_a_number(req)
            return False
        if result.token_ids_logprobs is not None and req.token_ids_logprob:
            req.output_token_ids_logprobs.append(result.token_ids_logprobs[i])
        if req.max_new_tokens == 0:
            req.finished_reason = FinishReason(type="length", length=0)
            return False
        token = result.next_token_ids[i]
        if req.grammar is not None and (failure := req.grammar.accept(token)) is not None:
            req.finished_reason = _broken_off(failure, len(req.output_ids))
            return False
        req.output_ids.append(token)
        if req.return_logprob and result.logprobs is not None:
            req.output_logprobs.append(result.logprobs[i])
            req.output_top_logprobs.append(result.top_logprobs[i] if result.top_logprobs else [])
        if req.transfer is None:  # else it ends where it is decoded
            req.finished_reason = finish_reason(req, self._state.limits, self._decode)
        return True

    def _settle(self, req: Req, batch: ScheduleBatch, i: int, *, sound: bool = True) -> None:
        """Memory after the token: a finished request gives all back, a prefilled one shares its prompt.

        `sound`: the KV that the forward wrote may be shared.
        """
        state = self._state
        if req.finished:
            req.time_stats.completion = state.clock.now()
            ids = req.fill_ids()[: req.committed_len]
            if req.transfer is not None:
                reason = req.finished_reason
                assert reason is not None
                req.transfer.abort(reason.message or reason.type, reason.status_code or 500)
                state.give_back(req, "finish")
            else:
                state.cache.release(req, ids, insert=sound and not req.is_hollow, why="finish")
            state.live.pop(req.rid, None)
        elif batch.forward_mode is ForwardMode.PREBUILT:
            if not req.is_hollow:
                state.cache.checkpoint(req, req.origin_input_ids)
        elif batch.forward_mode.is_extend and i < len(batch.reqs) - batch.decode_rows:
            state.cache.checkpoint(req, req.fill_ids()[: req.extend_end])
            if self._hand_over is not None and req.transfer is not None:
                self._hand_over.prefilled(req)

    def _answer_probes(self, state: SchedulerState) -> None:
        for _ in range(state.health_probes):
            self._to_tokenizer.send(HealthCheckOutput(rid=""))
        state.health_probes = 0

    def _emit_finished(self, result: BatchResult, wait_ns: int) -> None:
        trace = self._state.trace
        if trace.on:
            trace.emit(
                schema.BatchFinished(
                    bid=result.bid,
                    start_ns=result.start_ns,
                    end_ns=result.end_ns,
                    can_run_cuda_graph=result.can_run_cuda_graph,
                    wait_ns=wait_ns,
                    forward_end_ns=result.forward_end_ns,
                    sample_start_ns=result.sample_start_ns,
                    copy_start_ns=result.copy_start_ns,
                    copy_end_ns=result.copy_end_ns,
                )
            )

    def _emit_sampled(self, bid: int, taken: list[Req], tokens: list[int]) -> None:
        trace = self._state.trace
        if trace.on:
            rids = tuple([req.rid for req in taken])
            trace.emit(schema.TokensSampled(bid=bid, rids=rids, token_ids=tuple(tokens)))


def _may_stream(req: Req, batch: ScheduleBatch) -> bool:
    """Not a prompt that goes on, nor one whose tokens another server sends."""
    return req is not batch.chunked_req and (req.transfer is None or req.finished)


def _broken_off(failure: Failure, tokens: int) -> FinishReason:
    """The end of a request whose grammar gave up, or whose token its grammar does not know."""
    message = f"the grammar cannot go on after {tokens} tokens: {failure.message}"
    if failure.too_complex:
        return FinishReason(type="abort", message=message, status_code=400, err_type="BadRequestError")
    return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")


def _processor_failed(req: Req, failure: ProcessorFailure) -> FinishReason:
    who = f"the logit processor {req.custom_logit_processor!r}"
    if failure.is_refusal:
        message = f"{who} refuses custom_params: {failure.why}"
        return FinishReason(
            type="abort", message=message, status_code=400, err_type="BadRequestError", param="custom_params"
        )
    message = f"{who} failed after {len(req.output_ids)} tokens: {failure.why}"
    return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")


def _not_a_number(req: Req) -> FinishReason:
    message = (
        f"the model's logits hold a NaN after {len(req.output_ids)} tokens: its weights or a number format too narrow "
        "for them are at fault"
    )
    return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")
