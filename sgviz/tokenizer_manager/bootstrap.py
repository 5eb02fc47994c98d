"""Where a request of a prefill/decode pair meets its other side: the fields of one call, one set an answer.

Mirrors the bootstrap fields of SGLang's GenerateReqInput. There one room of a batch counts up by itself; here each
answer brings its own, so that both servers of a pair mean the same. Imports: messages, errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sgviz.errors import BadRequest
from sgviz.messages import EmbeddingReqInput, GenerateReqInput
from sgviz.tokenizer_manager.ranks import check_rank

PER_ANSWER = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
FIELDS = (*PER_ANSWER, "disagg_prefill_dp_rank")
LAST_ROOM = 2**63 - 1
LAST_PORT = 65_535
MOST_RANKS = 64
Meeting = dict[str, object]  # by field; with n > 1 the fields of PER_ANSWER are lists of n


def spread_meeting(
    obj: GenerateReqInput, size: int | None, n: int, mode: str, *, by_room: bool = False
) -> list[Meeting]:
    """What each prompt of the call has of FIELDS.

    Args:
        size: prompts of a batch; None: a lone prompt. n: answers a prompt. mode: disaggregation_mode of this server.
        by_room: its ranks are chosen by the room.

    Raises:
        BadRequest: a field that this server needs is missing, has no use here, or is not one value an answer.
    """
    if mode == "null":
        _refuse_all(obj, FIELDS if not by_room else [name for name in FIELDS if name != "bootstrap_room"])
        return [{"bootstrap_room": room} for room in _rooms_alone(obj.bootstrap_room, size or 1)]
    if isinstance(obj, EmbeddingReqInput):
        return [{} for _ in range(size or 1)]  # the scheduler says that it makes no vectors
    _check(obj)
    answers = (size or 1) * n
    lone = size is None and n == 1
    columns = {name: _column(name, getattr(obj, name), answers, lone) for name in PER_ANSWER}
    rooms = columns["bootstrap_room"]
    if len(set(rooms)) < len(rooms):
        raise BadRequest(
            "bootstrap_room: two answers of one request cannot share a room", param="bootstrap_room"
        )
    return [
        {
            name: column[i * n] if n == 1 else list(column[i * n : i * n + n])
            for name, column in columns.items()
        }
        for i in range(size or 1)
    ]


def rank_to_run(obj: GenerateReqInput, size: int, mode: str) -> int | None:
    """Which of this server's `size` ranks the request asks for; None: any, or there is one.

    A prefill server is the one that `disagg_prefill_dp_rank` means, whatever rank the decode side is to take.

    Raises:
        BadRequest: there is no such rank.
    """
    if mode == "prefill" and obj.disagg_prefill_dp_rank is not None:
        return check_rank(obj.disagg_prefill_dp_rank, size, "disagg_prefill_dp_rank")
    return check_rank(obj.routed_dp_rank, size)


def one_meeting(obj: GenerateReqInput, sample: int) -> Meeting:
    """The fields of answer number `sample` of one of the prompts with n > 1."""
    fields = {name: getattr(obj, name) for name in PER_ANSWER}
    return {name: value[sample] if isinstance(value, list) else value for name, value in fields.items()}


def apart(prompts: Sequence[GenerateReqInput], n: int) -> list[GenerateReqInput]:
    """Each of n answers a prompt as a request of its own, named after it alike on both servers.

    Nothing runs before them to fill the cache: the two sides could not agree on a room for it.
    """
    return [_answer(prompt, sample) for prompt in prompts for sample in range(n)]


def _answer(prompt: GenerateReqInput, sample: int) -> GenerateReqInput:
    params = prompt.sampling_params
    assert not isinstance(params, list), "split gives one set a prompt"
    seed = None if params.sampling_seed is None else params.sampling_seed + sample
    params = msgspec.structs.replace(params, n=1, sampling_seed=seed)
    rid = f"{prompt.rid}_{sample}"
    return msgspec.structs.replace(prompt, rid=rid, sampling_params=params, **one_meeting(prompt, sample))


def _rooms_alone(given: object, prompts: int) -> list[object]:
    """The rooms of prompts that meet nobody: one for all, or one each; they say no more than who runs them."""
    rooms = given if isinstance(given, list) else [given] * prompts
    if len(rooms) != prompts:
        raise BadRequest(
            f"bootstrap_room has {len(rooms)} entries for {prompts} prompts", param="bootstrap_room"
        )
    for room in rooms:
        if room is not None:
            _check_value("bootstrap_room", room)
    return rooms


def _refuse_all(obj: GenerateReqInput, names: Sequence[str]) -> None:
    for name in names:
        if getattr(obj, name) is not None:
            raise BadRequest(
                f"{name} is for prefill and decode servers; this one is neither (disaggregation_mode null)",
                param=name,
            )


def _check(obj: GenerateReqInput) -> None:
    for name in ("bootstrap_room", "bootstrap_host"):
        if getattr(obj, name) is None:
            raise BadRequest(
                f"{name}: a prefill or decode server needs it of every request; send it to the router (sgviz router), "
                "which gives it one",
                param=name,
            )
    rank = obj.disagg_prefill_dp_rank
    if rank is not None:
        _check_number("disagg_prefill_dp_rank", rank, 0, MOST_RANKS - 1)


def _column(name: str, value: object, answers: int, lone: bool) -> list[object]:
    """One value an answer. A room cannot be shared; a host or port that is no list is that of all."""
    if not isinstance(value, list):
        if not lone and name == "bootstrap_room":
            raise BadRequest(f"{name} must be a list of {answers} rooms, one an answer, got one", param=name)
        column = [value] * answers
    elif lone:
        raise BadRequest(f"{name} must not be a list for a single answer", param=name)
    elif len(value) != answers:
        raise BadRequest(f"{name} has {len(value)} entries for {answers} answers", param=name)
    else:
        column = value
    for each in column:
        _check_value(name, each)
    return column


def _check_value(name: str, value: object) -> None:
    if name == "bootstrap_room":
        _check_number(name, value, 0, LAST_ROOM)
    elif name == "bootstrap_port":
        if value is not None:
            _check_number(name, value, 1, LAST_PORT)
    elif not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be the name or address of a host, got {value!r:.60}", param=name)


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer from {low} to {high}, got {value!r:.60}", param=name)
