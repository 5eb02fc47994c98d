"""Checks of what a request asks of log-probabilities and logit processors. Imports: messages, errors."""

from __future__ import annotations

from collections.abc import Sequence

from sgviz.errors import BadRequest, suggest
from sgviz.messages import GenerateReqInput
from sgviz.messages.logprob_start import check_start, settle_start

NAME = "token_ids_logprob"


def spread_token_ids(
    value: list[int] | list[list[int] | None] | None, size: int | None, vocab_size: int
) -> list[list[int] | None]:
    """One list of ids (or None) a prompt; `size` is None for a lone prompt. A flat list is for every prompt.

    Raises:
        BadRequest: a wrong shape, or an id outside the vocabulary.
    """
    if value is None or not isinstance(value, list) or not any(isinstance(each, list) for each in value):
        ids = _ids(value, vocab_size)
        return [ids] * (size or 1)
    if len(value) != size:
        prompts = "one prompt, which takes a flat list" if size is None else f"{size} prompts"
        raise BadRequest(f"{NAME} has {len(value)} entries for {prompts}", param=NAME)
    return [_ids(each, vocab_size) for each in value]


def _ids(value: object, vocab_size: int) -> list[int] | None:
    """The ids of one prompt; None for none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRequest(f"{NAME} must be a list of integers, or a list of such lists", param=NAME)
    if len(value) > vocab_size:
        raise BadRequest(f"{NAME} has {len(value)} ids; at most {vocab_size} can be asked for", param=NAME)
    bad = next((token for token in value if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise BadRequest(
            f"{NAME}: token id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param=NAME
        )
    return value


def start_of(one: GenerateReqInput, length: int) -> int:
    """The first of the `length` prompt tokens whose log-probability is wanted, -1 for none.

    Of a turn of a session as it was asked for: it counts from the beginning of the context, which is the scheduler's.

    Raises:
        BadRequest: it lies outside the prompt, or the answer would have too many entries.
    """
    if one.session_params is not None:
        return check_start(one.logprob_start_len)
    tops = one.top_logprobs_num
    assert isinstance(tops, int)
    return settle_start(one.logprob_start_len, length, tops, len(one.token_ids_logprob or ()))


def token_ids_of(one: GenerateReqInput) -> list[int] | None:
    """The ids of one of `split`'s requests."""
    ids: list[int] = []
    for token in one.token_ids_logprob or ():
        assert isinstance(token, int), "split gives one list a prompt"
        ids.append(token)
    return ids or None


def check_processor(name: str | None, names: Sequence[str]) -> None:
    """Raise BadRequest unless `name` is one of the server's logit processors, or none at all."""
    if name is None or name in names:
        return
    there = f"there are {', '.join(names)}" if names else "the setting custom_logit_processors names none"
    raise BadRequest(
        f"custom_logit_processor: unknown name {str(name)[:80]!r}{suggest(str(name), names)}; {there}",
        param="custom_logit_processor",
    )
