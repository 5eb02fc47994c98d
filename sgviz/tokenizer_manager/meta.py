"""The answer's shape: SGLang's `{"text", "output_ids", "meta_info"}`, made only when somebody reads it.

Imports: messages, events, and the state it reads.
"""

from __future__ import annotations

from typing import Any

from sgviz.events.clock import WallClock
from sgviz.events.time_stats import TimeStats, end_to_end_ns, stages
from sgviz.messages.generate import WEIGHT_VERSION, failure_of
from sgviz.tokenizer_manager.state import ReqState

Output = dict[str, Any]
"""`text` and `output_ids` (cumulative), `meta_info`, and `index` where a request has several answers."""

NS = 1e9


class OutputBuilder:
    """Makes the dicts.

    Args:
        unix_offset_ns: calendar time minus the clock of the stamps; None: as of now on the wall clock.
    """

    def __init__(self, unix_offset_ns: int | None = None) -> None:
        unix, monotonic = WallClock.anchor()
        self._offset = unix - monotonic if unix_offset_ns is None else unix_offset_ns

    def output(self, state: ReqState) -> Output:
        """All that is known of `state` now."""
        out: Output = {
            "text": state.text,
            "output_ids": list(state.output_ids),
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
            "weight_version": WEIGHT_VERSION,
            "dp_rank": 0,
        }
        if state.obj.return_logprob:
            meta["output_token_logprobs"] = list(state.token_logprobs)
            meta["output_token_logprobs_length"] = len(state.token_logprobs)
            meta["output_top_logprobs"] = list(state.top_logprobs)
        if state.finished:
            meta.update(self._times(state.stats, state.completion_tokens, stream=state.obj.stream))
        return meta

    def _times(self, stats: TimeStats, completion_tokens: int, *, stream: bool) -> dict[str, Any]:
        first = _first_token(stats, stream=stream)
        decoding = stats.finished - first if first else 0
        return {
            "e2e_latency": end_to_end_ns(stats) / NS,
            "queue_time": stats.queue_ns / NS,
            "forward_entry_time": self._calendar(stats.forward_entry),
            "prefill_finished_time": self._calendar(stats.prefill_finished),
            "request_received_ts": self._calendar(stats.created),
            "request_finished_ts": self._calendar(stats.finished),
            "first_token_latency": (first - stats.created) / NS if first else None,
            "decode_throughput": (completion_tokens - 1) / decoding * NS if decoding > 0 else None,
            "time_stats": {stage.name: stage.duration_ns / NS for stage in stages(stats)},
        }

    def _calendar(self, stamp: int) -> float | None:
        """Unix seconds of a stamp; None if it was not reached."""
        return (stamp + self._offset) / NS if stamp else None


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
