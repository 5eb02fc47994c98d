"""When does a request end? Mirrors `update_finish_state` (facts 8.3), with one new token a step.

The scheduler decodes the tail of a request only if it has stop strings. Imports: batch, messages.
"""

from __future__ import annotations

import logging
from typing import Protocol

from sgviz.batch.req import Req
from sgviz.messages import FinishReason
from sgviz.scheduler.state import Limits

log = logging.getLogger(__name__)

PARTIAL = "\ufffd"  # what bytes that make no character yet decode to


class Decode(Protocol):
    """Token ids to text, with or without the text of special tokens."""

    def __call__(self, ids: list[int], skip_special_tokens: bool, /) -> str: ...


def finish_reason(req: Req, limits: Limits, decode: Decode) -> FinishReason | None:
    """The reason to end now, after the newest token was appended; None to go on.

    Order: what was decided before (an abort), a broken token, stop strings, stop ids and EOS, the end of the grammar,
    length. (SGLang asks for the length before the grammar, which ends there with an end token only.)
    """
    if req.to_finish is not None:
        return req.to_finish
    token = req.output_ids[-1]
    params = req.sampling_params
    if not 0 <= token < limits.vocab_size:
        message = f"the model gave token {token}, outside the vocabulary of {limits.vocab_size}"
        return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")
    try:
        text_match = _matched_stop(req, decode)
    except Exception as error:
        return _undecodable(req, error)
    if text_match is not None:
        return FinishReason(type="stop", matched=text_match)
    if not params.ignore_eos and (token in limits.eos_token_ids or token in (params.stop_token_ids or ())):
        return FinishReason(type="stop", matched=token)
    if req.grammar is not None and req.grammar.ended:
        return FinishReason(type="stop", matched=token if token in limits.eos_token_ids else None)
    if len(req.output_ids) >= req.max_new_tokens:
        return FinishReason(type="length", length=len(req.output_ids))
    return None


def _undecodable(req: Req, error: Exception) -> FinishReason:
    """The end of a request whose newest tokens the tokenizer raises at."""
    log.error("request %s ends: its stop strings cannot be looked for", req.rid, exc_info=error)
    message = f"its tokens could not be decoded to look for stop strings: {type(error).__name__}: {error}"
    return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")


def tail_may_become_stop(req: Req, decode: Decode) -> bool:
    """The text ends in what could be the beginning of a stop string, so it must not be sent yet."""
    stops = req.sampling_params.stop_strings
    if not stops:
        return False
    tail = _tail(req, decode)
    return any(_overlap(tail, stop) for stop in stops)


def _matched_stop(req: Req, decode: Decode) -> str | None:
    """The stop string that stands in the text first, if one does."""
    stops = req.sampling_params.stop_strings
    if not stops:
        return None
    tail = _tail(req, decode)
    found = [(tail.find(stop), stop) for stop in stops if stop in tail]
    return min(found)[1] if found else None


def _tail(req: Req, decode: Decode) -> str:
    """Text of the last tokens as the client will see it, long enough to hold any stop string.

    Decoded once a token, though asked for twice: by the finish rules and by the streamer.
    """
    length, text = req.tail
    if length != len(req.output_ids):
        params = req.sampling_params
        longest = max(len(stop.encode()) for stop in params.stop_strings)
        text = _last_text(req.output_ids, longest, params.skip_special_tokens, decode)
        req.tail = len(req.output_ids), text
    return text


def _last_text(ids: list[int], longest: int, skip: bool, decode: Decode) -> str:
    """Text of the newest token and of at least `longest - 1` bytes before it, where there are so many.

    A token has at least one byte, but for the special ones that are skipped: with those, look further back.
    """
    window = longest + 1
    if skip:
        while window < len(ids) and _size(decode(ids[-window:-1], skip)) < longest - 1:
            window *= 2
    return decode(ids[-window:], skip)


def _size(text: str) -> int:
    """Bytes of whole characters."""
    return len(text.strip(PARTIAL).encode())


def _overlap(text: str, stop: str) -> bool:
    """Whether a proper beginning of `stop` is an ending of `text`."""
    most = min(len(text), len(stop) - 1)
    return any(text.endswith(stop[:length]) for length in range(most, 0, -1))
