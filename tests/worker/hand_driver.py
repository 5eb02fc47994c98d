"""Drives a worker without a scheduler: batches of real requests over a real cache, put together by hand."""

from __future__ import annotations

from collections.abc import Sequence

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.kv_cache import KVCache
from sgviz.events.tracer import Tracer
from sgviz.messages import SamplingParams
from sgviz.worker.protocol import GenerationBatchResult, Worker


def make_req(
    rid: str,
    ids: Sequence[int],
    *,
    logprobs: int | None = None,
    outputs: Sequence[int] = (),
    **params: object,
) -> Req:
    """A request as the scheduler makes it; `logprobs`: alternatives it wants, None: no logprobs at all."""
    return Req(
        rid=rid,
        origin_input_ids=list(ids),
        sampling_params=SamplingParams(**params).normalize(),
        max_new_tokens=64,
        return_logprob=logprobs is not None,
        top_logprobs_num=logprobs or 0,
        output_ids=list(outputs),
    )


class HandDriver:
    """`extend`, `decode`, `mixed` make batches; `step` runs one and appends what was sampled."""

    def __init__(self, worker: Worker, *, page_size: int = 1, rows: int = 64) -> None:
        self.worker = worker
        info = worker.info
        self.cache = KVCache(
            size=info.max_total_num_tokens,
            page_size=page_size,
            rows=rows,
            max_context_len=info.context_len,
            trace=Tracer("scheduler", None),
        )
        self.bid = 0

    def extend(self, reqs: Sequence[Req], most: int | None = None) -> ScheduleBatch:
        """Prefill what is missing of each, at most `most` tokens a request."""
        for req in reqs:
            ids = req.fill_ids()
            if req.kv.node is None:
                self.cache.adopt(req, self.cache.match(ids, req.namespace, len(ids) - 1))
            req.prefix_len = req.kv.allocated
            req.extend_end = len(ids) if most is None else min(len(ids), req.prefix_len + most)
        batch = self._batch(reqs)
        batch.prepare_for_extend(self.cache, self.bid)
        cut = [req for req in reqs if req.extend_end < req.seqlen]
        batch.chunked_req = cut[0] if cut else None
        return batch

    def decode(self, reqs: Sequence[Req]) -> ScheduleBatch:
        batch = self._batch(reqs)
        batch.prepare_for_decode(self.cache, self.bid)
        return batch

    def mixed(self, extending: Sequence[Req], decoding: Sequence[Req]) -> ScheduleBatch:
        batch = self.extend(extending)
        batch.mix_with_running(self._batch(decoding), self.cache)
        return batch

    def step(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Launch, wait, and give every request that is not cut its token."""
        result = self.worker.launch(batch).result()
        self.process(batch, result)
        return result

    def process(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        for i, (req, token) in enumerate(zip(batch.reqs, result.next_token_ids)):
            if req is batch.chunked_req:
                continue
            req.output_ids.append(token)
            if req.return_logprob:
                assert result.logprobs is not None
                assert result.top_logprobs is not None
                req.output_logprobs.append(result.logprobs[i])
                req.output_top_logprobs.append(result.top_logprobs[i])

    def generate(self, reqs: Sequence[Req], tokens: int, most: int | None = None) -> list[list[int]]:
        """Prefill (in chunks of `most`) and decode until everybody has `tokens` outputs."""
        for req in reqs:
            while not req.output_ids:
                self.step(self.extend([req], most))
        while len(reqs[0].output_ids) < tokens:
            self.step(self.decode(reqs))
        return [req.output_ids for req in reqs]

    def retract(self, req: Req) -> None:
        """Take its KV away; the outputs stay."""
        row = req.kv.req_pool_idx
        self.cache.release(req, [], insert=False, why="retract")
        self.worker.forget([row])
        req.reset_for_retract()

    def finish(self, req: Req, *, insert: bool = True) -> None:
        row = req.kv.req_pool_idx
        self.cache.release(req, req.fill_ids()[: req.committed_len], insert=insert, why="finish")
        self.worker.forget([row])

    def _batch(self, reqs: Sequence[Req]) -> ScheduleBatch:
        self.bid += 1
        return ScheduleBatch(req_to_token_pool=self.cache.req_to_token_pool, reqs=list(reqs))
