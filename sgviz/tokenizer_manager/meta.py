"""The answer's shape: SGLang's `{"text", "output_ids", "meta_info"}` or `{"embedding", "meta_info"}`.

Made only when somebody reads it.

Imports: messages, events, and the state it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sgviz.events.clock import WallClock
from sgviz.events.time_stats import TimeStats, stages
from sgviz.messages import GenerateReqInput
from sgviz.messages.embedding import EmbeddingReqInput, unpack_vector
from sgviz.messages.generate import failure_of
from sgviz.tokenizer_manager.grown import Grown
from sgviz.tokenizer_manager.state import ReqState
from sgviz.tokenizer_manager.weights import Weights

Output = dict[str, Any]
"""`text` and `output_ids` (cumulative) or `embedding`, `meta_info`, and `index` where a request has several answers."""

NS = 1e9


class OutputBuilder:
    """Makes the dicts.

    Args:
        unix_offset_ns: calendar time minus the clock of the stamps; None: as of now on the wall clock.
        weights: those that the engine runs with.
    """

    def __init__(self, unix_offset_ns: int | None = None, weights: Weights | None = None) -> None:
        self._weights = weights or Weights()
        unix, monotonic = WallClock.anchor()
        self._offset = unix - monotonic if unix_offset_ns is None else unix_offset_ns

    def output(self, state: ReqState) -> Output:
        """All that is known of `state` now."""
        if isinstance(state.obj, EmbeddingReqInput):
            out: Output = {"embedding": unpack_vector(state.embedding), "meta_info": self.meta_info(state)}
        else:
            out = {
                "text": state.text,
                "output_ids": _taker(state.obj)(state.output_ids),
                "meta_info": self.meta_info(state),
            }
        if state.index is not None:
            out["index"] = state.index
        return out

    def meta_info(self, state: ReqState) -> dict[str, Any]:
        """Counts and reason; logprobs if asked for; times (seconds) once it has finished."""
        reason = state.finish_reason
        meta: dict[str, Any] = {
            "id": state.rid,
            "finish_reason": reason.as_dict() if reason else None,
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": state.completion_tokens,
            "cached_tokens": state.cached_tokens if state.cached_before is None else state.cached_before,
            "num_retractions": state.num_retractions,
            "weight_version": self._weights.version,
            "dp_rank": state.dp_rank or 0,
        }
        if state.weight_changes:
            meta["weight_version_changes"] = [list(change) for change in state.weight_changes]
        if state.obj.return_logprob:
            meta |= state.logprobs.meta(_taker(state.obj), token_ids=bool(state.obj.token_ids_logprob))
        if state.finished:
            meta.update(self._times(state.stats, state.completion_tokens, stream=state.obj.stream))
        return meta

    def _times(self, stats: TimeStats, completion_tokens: int, *, stream: bool) -> dict[str, Any]:
        first = _first_token(stats, stream=stream)
        decoding = stats.finished - first if first else 0
        reached = stages(stats)
        return {
            "e2e_latency": sum(stage.duration_ns for stage in reached) / NS,
            "queue_time": stats.queue_ns / NS,
            "forward_entry_time": self._calendar(stats.forward_entry),
            "prefill_finished_time": self._calendar(stats.prefill_finished),
            "request_received_ts": self._calendar(stats.created),
            "request_finished_ts": self._calendar(stats.finished),
            "first_token_latency": (first - stats.created) / NS if first else None,
            "decode_throughput": (completion_tokens - 1) / decoding * NS if decoding > 0 else None,
            "time_stats": {stage.name: stage.duration_ns / NS for stage in reached},
        }

    def _calendar(self, stamp: int) -> float | None:
        """Unix seconds of a stamp; None if it was not reached."""
        return (stamp + self._offset) / NS if stamp else None


def _taker(obj: GenerateReqInput) -> Callable[[list[Any]], Sequence[Any]]:
    """What makes an output's list of one that goes on growing."""
    return Grown if obj.stream and obj.as_views else list


def _first_token(stats: TimeStats, *, stream: bool) -> int:
    """When the first token was there (0: never); unstreamed, as it arrives with the last, in the scheduler."""
    return (
        stats.first_token if stream or not stats.first_token else stats.prefill_finished or stats.first_token
    )


def raise_failure(item: Output | list[Output]) -> None:
    """Raise the error that an output stands for, see `failure_of`."""
    for output in item if isinstance(item, list) else [item]:
        failure = failure_of(output["meta_info"].get("finish_reason"))
        if failure is not None:
            raise failure
