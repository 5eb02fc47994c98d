"""PREBUILT batches: requests whose KV came from elsewhere begin to decode, without a forward.

What the prefill server found takes the place of a forward's result, so the first token goes the way of every other:
grammar, log-probabilities, stop rules, streaming. Mirrors `prepare_for_prebuilt` and `process_batch_result_prebuilt`
(facts 12.3, step 5). Imports: batch, disaggregation (protocol), worker protocol, scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from sgviz.batch.input_logprobs import InputLogprobs
from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.disaggregation.protocol import KVAux, KVReceiver
from sgviz.scheduler.disagg.kept import Restore
from sgviz.scheduler.results import ResultProcessor
from sgviz.scheduler.state import SchedulerState
from sgviz.worker.protocol import GenerationBatchResult, MovesKV, Worker


class DecodeDevice(Worker, MovesKV, Protocol):
    """A worker that takes KV from elsewhere."""


class Prebuilt:
    """Takes the ready requests into the running batch.

    Args:
        tell_planned: emits batch.planned.
    """

    def __init__(
        self,
        state: SchedulerState,
        worker: DecodeDevice,
        results: ResultProcessor,
        tell_planned: Callable[[ScheduleBatch], None],
    ) -> None:
        self._state = state
        self._worker = worker
        self._results = results
        self._tell_planned = tell_planned

    def take_ready(self) -> None:
        """All of them, those that come back from a retraction first."""
        queues = self._state.disagg
        ready = list(queues.ready)
        queues.ready.clear()
        back = [req for req in ready if isinstance(req.transfer, Restore)]
        new = [req for req in ready if not isinstance(req.transfer, Restore)]
        for reqs in (back, new):
            if reqs:
                self._begin(reqs, fresh=reqs is new)

    def _begin(self, reqs: list[Req], *, fresh: bool) -> None:
        state = self._state
        batch = ScheduleBatch(state.cache.req_to_token_pool, reqs)
        batch.prepare_for_prebuilt(state.take_bid())
        self._tell_planned(batch)
        now = state.clock.now()
        for req in reqs:
            self._enter(req, now)
        found = self._found(batch, now) if fresh else None
        for req in reqs:
            req.transfer = None
        self._results.process_prebuilt(batch, found)
        going = ScheduleBatch(batch.req_to_token_pool, [req for req in reqs if not req.finished])
        self._prime(going)
        state.running_batch.merge_batch(going)

    def _enter(self, req: Req, now: int) -> None:
        stats, state = req.time_stats, self._state
        if stats.wait_queue_entry:
            stats.queue_ns += now - (req.requeued_ns or stats.wait_queue_entry)
        stats.forward_entry = stats.forward_entry or now
        if not req.counted_cached:
            state.prompt_ct += len(req.origin_input_ids)
            state.cached_ct += req.prefix_len
        req.counted_cached = True
        req.is_retracted = False

    def _found(self, batch: ScheduleBatch, now: int) -> GenerationBatchResult:
        """What the prefill servers gave, as the result of a forward."""
        auxes = [_aux(req) for req in batch.reqs]
        for req, aux in zip(batch.reqs, auxes, strict=True):
            req.cached_tokens = aux.cached_tokens
        return GenerationBatchResult(
            bid=batch.bid,
            next_token_ids=[aux.first_token for aux in auxes],
            forward_pass_id=0,
            start_ns=now,
            end_ns=now,
            logprobs=[aux.output_logprob or 0.0 for aux in auxes],
            top_logprobs=[aux.output_top_logprobs for aux in auxes],
            token_ids_logprobs=[aux.output_token_ids_logprobs for aux in auxes],
            input_logprobs=[_inputs(aux) for aux in auxes],
        )

    def _prime(self, batch: ScheduleBatch) -> None:
        """The device decodes on from the newest token of each."""
        if batch.is_empty:
            return
        freed = self._state.cache.req_to_token_pool.take_freed()
        if freed:  # before the rows are their new owners'
            self._worker.forget(freed)
        for req in batch.reqs:
            req.is_primed = True
        self._worker.prime(batch.rows, [req.output_ids[-1] for req in batch.reqs])


def _aux(req: Req) -> KVAux:
    aux = cast(KVReceiver, req.transfer).aux
    assert aux is not None  # looked at when it came
    return aux


def _inputs(aux: KVAux) -> InputLogprobs:
    return InputLogprobs(
        logprobs=list(aux.input_token_logprobs),
        tops=list(aux.input_top_logprobs),
        token_ids=list(aux.input_token_ids_logprobs),
    )
