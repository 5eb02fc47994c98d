"""OutputStreamer: which tokens leave now, as one BatchTokenIDOutput. Mirrors SGLang's component (facts 8.4).

Streaming: the first token at once, then every `stream_interval` tokens; a due send waits while the text
could turn into a stop string. Not streaming: nothing until the end but a forced send every 50 tokens.
One final entry a rid, ever. Imports: batch, messages, events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from sgviz.batch.req import INIT_INCREMENTAL_DETOKENIZATION_OFFSET, Req
from sgviz.events import schema
from sgviz.messages import BatchEmbeddingOutput, BatchTokenIDOutput
from sgviz.scheduler.embedding_output import embedding_output
from sgviz.scheduler.finish import Decode, tail_may_become_stop
from sgviz.scheduler.logprob_columns import add_logprobs
from sgviz.scheduler.state import SchedulerState

FORCE_STREAM_INTERVAL = 50


class ToDetokenizer(Protocol):
    def send(self, message: BatchTokenIDOutput | BatchEmbeddingOutput) -> None: ...


class OutputStreamer:
    """Sends what is due."""

    def __init__(self, state: SchedulerState, to_detokenizer: ToDetokenizer, decode: Decode) -> None:
        self._state = state
        self._to_detokenizer = to_detokenizer
        self._decode = decode

    def stream_output(self, reqs: Iterable[Req]) -> None:
        """Send the due tokens of `reqs` in one message; a finished request is due once and then never again."""
        due = [req for req in reqs if self._is_due(req)]
        if not due:
            return
        now = self._state.clock.now()
        for req in due:
            req.time_stats.output_streamed = now
        # a batch for vectors has no other members
        out = embedding_output(due) if due[0].is_embedding else _token_ids(due)
        trace = self._state.trace
        if trace.on:  # before the send: the next stage's event must not come earlier than this one
            finished = tuple([req.finished for req in due])
            counts = tuple(map(len, out.output_ids))
            trace.emit(schema.OutputStreamed(rids=tuple(out.rids), tokens=counts, finished=finished))
        self._to_detokenizer.send(out)

    def _is_due(self, req: Req) -> bool:
        if req.finished:
            return not req.finished_output
        unsent = len(req.output_ids) - req.send_token_offset
        if unsent <= 0:
            return False
        if not req.stream:
            return unsent >= FORCE_STREAM_INTERVAL and not tail_may_become_stop(req, self._decode)
        interval = req.sampling_params.stream_interval or self._state.limits.stream_interval
        first = req.send_token_offset == 0
        return (first or unsent >= interval) and not tail_may_become_stop(req, self._decode)


def _token_ids(due: list[Req]) -> BatchTokenIDOutput:
    """The rows of `due`, in their order."""
    out = _empty()
    starts = [req.send_token_offset for req in due]
    for req in due:
        _append(out, req)
    add_logprobs(out, due, starts)
    return out


def _empty() -> BatchTokenIDOutput:
    return BatchTokenIDOutput(
        rids=[], finished_reasons=[], output_ids=[], prompt_tokens=[], completion_tokens=[], cached_tokens=[],
        retraction_counts=[], time_stats=[], decode_ids=[], read_offsets=[], skip_special_tokens=[],
        spaces_between_special_tokens=[], no_stop_trim=[],
    )  # fmt: skip


def _append(out: BatchTokenIDOutput, req: Req) -> None:
    """One row: the delta since the last send, and the totals."""
    start = req.send_token_offset
    context = min(len(req.origin_input_ids), INIT_INCREMENTAL_DETOKENIZATION_OFFSET)
    delta = req.output_ids[start:]
    first = start == 0
    params = req.sampling_params
    out.rids.append(req.rid)
    out.finished_reasons.append(req.finished_reason)
    out.output_ids.append(delta)
    out.decode_ids.append(
        req.origin_input_ids[len(req.origin_input_ids) - context :] + delta if first else delta
    )
    out.read_offsets.append(context)
    out.prompt_tokens.append(len(req.origin_input_ids))
    out.completion_tokens.append(len(req.output_ids))
    out.cached_tokens.append(req.cached_tokens)
    out.retraction_counts.append(req.retraction_count)
    out.time_stats.append(msgspec.structs.replace(req.time_stats))
    out.skip_special_tokens.append(params.skip_special_tokens)
    out.spaces_between_special_tokens.append(params.spaces_between_special_tokens)
    out.no_stop_trim.append(params.no_stop_trim)
    req.send_token_offset = len(req.output_ids)
    req.finished_output = req.finished
