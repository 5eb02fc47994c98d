"""Why a request was refused: by serving, by the tokenizer manager, or by the scheduler at its door.

The first two tell it by `request.refused`; where a recording is older than that event, what they did with the
request says that much. SGLang answers the client, and logs.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgviz.events.schema import Reason, RequestAborted
from sgviz.recording.explanation import Cause
from sgviz.recording.requests import RequestState

BAD, CLIENT_GONE = 400, 499  # statuses: an error from here on; the client was found gone


class Refusal(NamedTuple):
    """At `t` (monotonic ns) it was refused: `cause` is what it went through then, `why` what the client was told."""

    t: int
    cause: Cause
    why: str


def refusal_of(
    life: RequestState, aborts: Sequence[tuple[int, RequestAborted]], sends: Sequence[int]
) -> Refusal | None:
    """The refusal of the request whose way is followed; None if it was taken.

    Args:
        aborts: `(t, event)` of this life. sends: when something of its answer was handed over.
    """
    body = life.refusal
    if body is not None:
        cause = Cause.TOKENIZE if body.where == "tokenizer" else Cause.CONVERT
        return Refusal(
            life.refused_at, Cause.NEVER_FITS if body.reason is Reason.NEVER_FITS else cause, body.why
        )
    for t, abort in aborts:
        here = abort.where == "tokenizer" and not life.stats.api_server_dispatch
        if abort.reason in (Reason.NEVER_FITS, Reason.GRAMMAR):
            return Refusal(t, Cause(abort.reason.value), abort.why)
        if abort.where == "intake" or here:
            return Refusal(t, Cause.TOKENIZE if here else Cause.INBOX, abort.why)
    return _by_its_answer(life, sends)


def _by_its_answer(life: RequestState, sends: Sequence[int]) -> Refusal | None:
    """It got an error and nobody took it."""
    stats, status = life.stats, life.status or 0
    told = sends[0] if sends else stats.response_sent if status >= BAD else 0
    if (
        not told
        or stats.api_server_dispatch
        or stats.scheduler_recv
        or life.children
        or status == CLIENT_GONE
    ):
        return None
    return Refusal(told, Cause.CONVERT, "serving did not accept what it asks")


def refusal_words(status: int | None, found: Refusal | None) -> str:
    """`refused with status 400: why`, or an empty string for a request that was taken."""
    if found is None:
        return ""
    return "refused" + (f" with status {status}" if status else "") + f": {found.why}"
