"""When does a request end? Mirrors `update_finish_state` (facts 8.3), with one new token a step.

The scheduler decodes the tail of a request only if it has stop strings. Imports: batch, messages.
"""

from __future__ import annotations

from collections.abc import Callable

from sgviz.batch.req import Req
from sgviz.messages import FinishReason
from sgviz.scheduler.state import Limits

Decode = Callable[[list[int]], str]


def finish_reason(req: Req, limits: Limits, decode: Decode) -> FinishReason | None:
    """The reason to end now, after the newest token was appended; None to go on.

    Order: what was decided before (an abort), a broken token, stop strings, stop ids and EOS, length.
    """
    if req.to_finish is not None:
        return req.to_finish
    token = req.output_ids[-1]
    params = req.sampling_params
    if not 0 <= token < limits.vocab_size:
        message = f"the model gave token {token}, outside the vocabulary of {limits.vocab_size}"
        return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")
    text_match = _matched_stop(req, decode)
    if text_match is not None:
        return FinishReason(type="stop", matched=text_match)
    if not params.ignore_eos and (token in limits.eos_token_ids or token in (params.stop_token_ids or ())):
        return FinishReason(type="stop", matched=token)
    if len(req.output_ids) >= req.max_new_tokens:
        return FinishReason(type="length", length=len(req.output_ids))
    return None


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
    """Text of the last tokens, long enough to hold any stop string: a token has at least one byte.

    Decoded once a token, though asked for twice: by the finish rules and by the streamer.
    """
    length, text = req.tail
    if length != len(req.output_ids):
        longest = max(len(stop.encode()) for stop in req.sampling_params.stop_strings)
        text = decode(req.output_ids[-(longest + 1) :])
        req.tail = len(req.output_ids), text
    return text


def _overlap(text: str, stop: str) -> bool:
    """Whether a proper beginning of `stop` is an ending of `text`."""
    most = min(len(text), len(stop) - 1)
    return any(text.endswith(stop[:length]) for length in range(most, 0, -1))
