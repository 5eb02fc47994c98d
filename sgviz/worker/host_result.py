"""Sampled tensors -> GenerationBatchResult of plain Python. Imports: worker.protocol, sampler (torch)."""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.batch.input_logprobs import InputLogprobs, Pairs
from sgviz.worker.input_part import InputPart
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
        failures=sampled.failures,
        nan_members=sampled.nan_members,
    )
    size = len(result.next_token_ids)
    if sampled.logprobs is not None:
        result.logprobs = [0.0] * size
        result.top_logprobs = [[] for _ in range(size)]
        for place, member in enumerate(sampling.columns.asked.tolist()):
            result.logprobs[member] = float(sampled.logprobs[place])
            result.top_logprobs[member] = _top(sampled, place, int(sampling.columns.top_logprobs_num[member]))
        result.token_ids_logprobs = _token_ids(sampled, sampling, size)
    if sampled.inputs:
        result.input_logprobs = [None] * size
        for part in sampled.inputs:
            result.input_logprobs[part.member] = _input(part)
    return result


def _top(sampled: Sampled, place: int, wish: int) -> Pairs:
    if sampled.top_logprobs is None or sampled.top_ids is None:
        return []
    values, ids = sampled.top_logprobs[place, :wish].tolist(), sampled.top_ids[place, :wish].tolist()
    return list(zip(values, ids))


def _token_ids(sampled: Sampled, sampling: SamplingBatch, size: int) -> list[Pairs] | None:
    if sampled.token_ids_logprobs is None:
        return None
    out: list[Pairs] = [[] for _ in range(size)]
    for member, values in zip(sampling.columns.asked.tolist(), sampled.token_ids_logprobs.tolist()):
        out[member] = list(zip(values, sampling.columns.reqs[member].token_ids_logprob))
    return out


def _input(part: InputPart) -> InputLogprobs:
    tops = zip(part.tops.tolist(), part.top_ids.tolist())
    return InputLogprobs(
        logprobs=part.logprobs.tolist(),
        tops=[list(zip(values, ids)) for values, ids in tops],
        token_ids=[list(zip(values, part.wanted)) for values in part.token_ids.tolist()],
    )
