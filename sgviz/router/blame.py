"""Whose fault a failed attempt is: what came of both calls, and how both servers are.

The server that says that an attempt failed is not always the one that failed: where the prefill host vanished, it is
the decode server that answers 503, as it waited for KV. Mirrors nothing of SGLang, whose routers believe whoever
answers. Imports: errors, serving (error bodies), this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from starlette.responses import Response

from sgviz.errors import Unavailable, from_status
from sgviz.router.calls import Trouble
from sgviz.router.servers import Server
from sgviz.serving.http_errors import error_response

MOST_WORDS = 300  # characters of what a server said


class Side(StrEnum):
    """Who is to blame."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    REQUEST = "request"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Stand:
    """How one call of an attempt stands.

    Attributes:
        losses: how often the server had been lost when the attempt began.
        trouble: why the call failed, if it has. done: it was answered well.
    """

    server: Server
    losses: int
    trouble: Trouble | None = None
    done: bool = False

    @property
    def name(self) -> str:
        return f"the {self.server.side} server {self.server.url}"

    @property
    def sick(self) -> str:
        """Why the server cannot be trusted to have done its part, or ""."""
        server = self.server
        if not server.healthy:
            return server.why
        return f"{server.last_why}, for a while" if server.losses > self.losses else ""

    @property
    def said(self) -> str:
        """What it answered."""
        assert self.trouble is not None
        answer = self.trouble.answer
        return f"{self.name} answered {answer.status_code}: {words_of(answer)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a failed attempt.

    Attributes:
        side: who is to blame. why: in words. answer: for the client, if no other pair follows. retry: one may do it.
        avoid: servers that the next attempt passes by if it can. lost: calls whose connection broke.
    """

    side: Side
    why: str
    answer: Response
    retry: bool = False
    avoid: tuple[Server, ...] = ()
    lost: tuple[Trouble, ...] = ()


class Failed(Exception):
    """An attempt failed; `verdict` says by whose fault."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)
        self.verdict = verdict


def is_open(first: Stand, other: Stand) -> bool:
    """Whether only the health of both servers can tell whose fault it is.

    `first` did not do what was asked, of `other` nothing better is known than that it did not either.
    """
    troubles = [stand.trouble for stand in (first, other) if stand.trouble is not None]
    return not other.done and not any(each.lost or each.answer.status_code < 500 for each in troubles)


def judge(first: Stand, other: Stand) -> Verdict:
    """Whose fault it is that the call `first` failed, as far as both calls and the last looks at both servers tell."""
    pair = (first, other)
    failed = [stand for stand in pair if stand.trouble is not None]
    lost = [stand for stand in failed if stand.trouble is not None and stand.trouble.lost]
    if lost:
        return _lost(lost)
    for stand in failed:
        if stand.trouble is not None and stand.trouble.answer.status_code < 500:
            return Verdict(Side.REQUEST, stand.said, stand.trouble.answer, avoid=(stand.server,))
    sick = [stand for stand in pair if stand.sick]
    if other.done or sick == [first]:
        return _own(first)
    return _sick(sick, failed) if sick else _unknown(first, other)


def overdue(prefill: Stand, decode: Stand, timeout: float) -> Verdict:
    """Nobody failed, but the answer did not begin within `timeout` seconds."""
    text = f"the answer did not begin within {timeout:g} s (request_timeout of the router)"
    sick = [stand for stand in (prefill, decode) if stand.sick]
    if sick:
        side, text = _side(sick), f"{text}: {_illness(sick)}"
    elif prefill.done:
        side, text = Side.DECODE, f"{text}: {prefill.name} has done its part, {decode.name} has not"
    else:
        side = Side.UNKNOWN
        text += f"; {prefill.name} and {decode.name} are both alive, and which of them is slow the router cannot know"
    return Verdict(side, text, error_response(from_status(504, text)))


def words_of(answer: Response) -> str:
    """The message of an error, or the beginning of whatever the body is."""
    told = _message(answer)
    text = bytes(answer.body).decode("utf-8", "replace") if told is None else told
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]} ..."


def _lost(lost: Sequence[Stand]) -> Verdict:
    """A connection that broke is proof."""
    troubles = tuple(stand.trouble for stand in lost if stand.trouble is not None)
    why = "; ".join(words_of(trouble.answer) for trouble in troubles)
    answer = troubles[0].answer if len(troubles) == 1 else error_response(Unavailable(why))
    servers = tuple(stand.server for stand in lost)
    return Verdict(_side(lost), why, answer, retry=True, avoid=servers, lost=troubles)


def _own(first: Stand) -> Verdict:
    """It speaks of itself: its answer goes to the client as it is."""
    trouble = first.trouble
    assert trouble is not None
    return Verdict(_side([first]), first.said, trouble.answer, retry=trouble.retry, avoid=(first.server,))


def _sick(sick: Sequence[Stand], failed: Sequence[Stand]) -> Verdict:
    """Who answered had only heard of it, or has a fault as well."""
    why = f"{_illness(sick)}; {'; '.join(stand.said for stand in failed)}"
    servers = tuple(stand.server for stand in sick)
    return Verdict(_side(sick), why, error_response(Unavailable(why)), retry=True, avoid=servers)


def _unknown(first: Stand, other: Stand) -> Verdict:
    """Both are alive; the way between them may be cut."""
    said = [stand for stand in (first, other) if stand.trouble is not None]
    silent = "" if other.trouble is not None else f", {other.name} nothing yet"
    doubt = "which of them failed, or the way between them, the router cannot know: both answer its looks"
    why = f"{'; '.join(stand.said for stand in said)}{silent}; {doubt}"
    # of two answers one that another pair may better, else that of the prefill side, which comes first
    best = min(said, key=lambda stand: (not _retry(stand), stand.server.side != "prefill"))
    assert best.trouble is not None
    servers = (first.server, other.server)
    return Verdict(Side.UNKNOWN, why, _reworded(best.trouble.answer, why), _retry(best), servers)


def _retry(stand: Stand) -> bool:
    return stand.trouble is not None and stand.trouble.retry


def _side(stands: Sequence[Stand]) -> Side:
    return Side(stands[0].server.side) if len(stands) == 1 else Side.BOTH


def _illness(sick: Sequence[Stand]) -> str:
    return "; ".join(f"{stand.name} failed: {stand.sick}" for stand in sick)


def _reworded(answer: Response, message: str) -> Response:
    """The same error with another message; a body that is no such error stays as it is."""
    if _message(answer) is None:
        return answer
    body = msgspec.json.decode(answer.body)
    body["error"]["message"] = message
    made = Response(msgspec.json.encode(body), answer.status_code)
    length = (b"content-length", b"%d" % len(made.body))
    made.raw_headers = [*(each for each in answer.raw_headers if each[0] != length[0]), length]
    return made


def _message(answer: Response) -> str | None:
    """That of an OpenAI error object; None if the body is none."""
    if answer.headers.get("content-type", "").partition(";")[0] != "application/json":
        return None
    try:
        body: Any = msgspec.json.decode(answer.body)
    except ValueError:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None
