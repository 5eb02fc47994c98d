"""Sampled tensors -> GenerationBatchResult of plain Python. Imports: worker.protocol, sampler (torch)."""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.worker.protocol import GenerationBatchResult
from sgviz.worker.sampler import Sampled
from sgviz.worker.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Which forward a result is of, and how the runner ran it; see GenerationBatchResult."""

    bid: int
    forward_pass_id: int
    can_run_cuda_graph: bool


def to_result(
    sampled: Sampled, sampling: SamplingBatch, of: Pass, start_ns: int, end_ns: int
) -> GenerationBatchResult:
    """Lists of `sampled`, whose tensors are on the host; those who asked for no logprob get 0.0 and []."""
    result = GenerationBatchResult(
        bid=of.bid,
        next_token_ids=sampled.tokens.tolist(),
        forward_pass_id=of.forward_pass_id,
        start_ns=start_ns,
        end_ns=end_ns,
        can_run_cuda_graph=of.can_run_cuda_graph,
    )
    if sampled.logprobs is not None:
        size = len(result.next_token_ids)
        result.logprobs = [0.0] * size
        result.top_logprobs = [[] for _ in range(size)]
        for place, member in enumerate(sampling.columns.asked.tolist()):
            result.logprobs[member] = float(sampled.logprobs[place])
            result.top_logprobs[member] = _top(sampled, place, int(sampling.columns.top_logprobs_num[member]))
    return result


def _top(sampled: Sampled, place: int, wish: int) -> list[tuple[float, int]]:
    if sampled.top_logprobs is None or sampled.top_ids is None:
        return []
    values, ids = sampled.top_logprobs[place, :wish].tolist(), sampled.top_ids[place, :wish].tolist()
    return list(zip(values, ids))
