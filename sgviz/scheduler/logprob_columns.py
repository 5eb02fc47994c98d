"""The logprob columns of a BatchTokenIDOutput: empty unless somebody asked. Mirrors the logprob part of SGLang's
stream_output (facts 7.7, 8.4).

Log-probabilities of the prompt leave once, with the first message of a request. Imports: batch, messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgviz.batch.req import Req
from sgviz.messages import BatchTokenIDOutput
from sgviz.messages.generate import InputToken, TopLogprobs


def add_logprobs(out: BatchTokenIDOutput, reqs: Sequence[Req], starts: Sequence[int]) -> None:
    """Set the columns for `reqs`, of which the tokens from `starts` on are sent (from 0: the first message)."""
    if not any(req.return_logprob for req in reqs):
        return
    rows = list(zip(reqs, starts, strict=True))
    out.output_token_logprobs = [req.output_logprobs[start:] for req, start in rows]
    out.output_top_logprobs = [req.output_top_logprobs[start:] for req, start in rows]
    if any(req.token_ids_logprob for req in reqs):
        out.output_token_ids_logprobs = [req.output_token_ids_logprobs[start:] for req, start in rows]
    whose = [req if start == 0 and req.logprob_start_len >= 0 else None for req, start in rows]
    if any(req is not None for req in whose):
        _add_inputs(out, whose)


def _add_inputs(out: BatchTokenIDOutput, whose: list[Req | None]) -> None:
    out.input_token_logprobs = [[] if req is None else _tokens(req) for req in whose]
    out.input_top_logprobs = [
        [] if req is None or not req.top_logprobs_num else _behind_null(req.input_logprobs.tops)
        for req in whose
    ]
    out.input_token_ids_logprobs = [
        [] if req is None or not req.token_ids_logprob else _behind_null(req.input_logprobs.token_ids)
        for req in whose
    ]


def _tokens(req: Req) -> list[InputToken]:
    """`(log-probability, id)` of the prompt tokens from the first one asked for."""
    ids = req.origin_input_ids[req.logprob_start_len :]
    return [(None, ids[0]), *zip(req.input_logprobs.logprobs, ids[1:])]


def _behind_null(values: list[TopLogprobs]) -> list[TopLogprobs | None]:
    return [None, *values]
