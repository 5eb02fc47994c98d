"""The messages of sessions: opening and closing one, and what a request says of the turn that it is.

Named as in SGLang's io_struct. Beyond it: closing is answered too, so that a name nobody knows is told.
Imports: errors, messages.rids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sgviz.errors import BadRequest
from sgviz.messages.rids import check_rid, check_unicode

MAX_OFFSET = 2**31 - 1  # more tokens than any context has


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Which session a request is a turn of, and where it goes on.

    Attributes:
        id: of the session.
        rid: the turn it goes on from; None: it begins anew.
        offset: its ids go on from this many tokens of that turn's context, counted from its end if negative; None
            and 0: from all of them.
        replace: what came after `rid` is forgotten (and `rid` ended, if it runs); without a `rid` all turns are.
        drop_previous_output: the context is the prompt of `rid` without what it generated.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


class OpenSessionReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """`capacity_of_str_len`: characters that the prompt of a turn, its context included, may have.

    `streaming`: turns follow each other, and each goes on from the one before. `timeout`: seconds without a turn
    after which it closes; None: never.
    """

    id: str
    session_id: str
    capacity_of_str_len: int
    streaming: bool = False
    timeout: float | None = None


class OpenSessionReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """`success` is False if a session of that name is open."""

    id: str
    session_id: str
    success: bool
    message: str = ""
    dp_rank: int = 0


class CloseSessionReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str
    session_id: str


class CloseSessionReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """`success` is False if no session of that name is open."""

    id: str
    success: bool
    message: str = ""
    dp_rank: int = 0


SessionQuestion = OpenSessionReqInput | CloseSessionReqInput
SessionReply = OpenSessionReqOutput | CloseSessionReqOutput

_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("a string", lambda value: isinstance(value, str)),
    "rid": ("a string", lambda value: isinstance(value, str)),
    "offset": ("an integer", lambda value: type(value) is int and abs(value) <= MAX_OFFSET),
    "replace": ("a boolean", lambda value: isinstance(value, bool)),
    "drop_previous_output": ("a boolean", lambda value: isinstance(value, bool)),
}


def session_params_of(
    given: object, name: str = "session_params"
) -> SessionParams | list[SessionParams | None] | None:
    """What a caller gave as dict, or list of dicts and None, one a prompt. null means absent.

    Raises:
        BadRequest: no object, no `id`, a field that there is not, or a value of the wrong type.
    """
    if given is None:
        return None
    if isinstance(given, list):
        return [None if each is None else _one(each, f"{name}[{n}]") for n, each in enumerate(given)]
    return _one(given, name)


def _one(given: object, name: str) -> SessionParams:
    if isinstance(given, SessionParams):
        return given
    if not isinstance(given, dict):
        raise BadRequest(f"{name} must be an object with the id of a session, got {given!r:.60}", param=name)
    for field, value in given.items():
        if field not in _FIELDS:
            raise BadRequest(f"{name} has no field {field!r:.60}; it has {', '.join(_FIELDS)}", param=name)
        wanted, fits = _FIELDS[field]
        if value is not None and not fits(value):
            where = f"{name}.{field}"
            raise BadRequest(f"{where} must be {wanted}, got {value!r:.60}", param=where)
    values = {field: value for field, value in given.items() if value is not None}
    if not values.get("id"):
        raise BadRequest(f"{name}.id: this field is required, the id of an open session", param=f"{name}.id")
    for field in ("id", "rid"):
        check_unicode(f"{name}.{field}", values.get(field, ""))
    return SessionParams(**values)


def check_session_id(session_id: object) -> None:
    """Raise BadRequest unless a session may have that name."""
    try:
        check_rid(session_id)
    except BadRequest as error:
        raise BadRequest(error.message.replace("rid", "session_id", 1), param="session_id") from None
