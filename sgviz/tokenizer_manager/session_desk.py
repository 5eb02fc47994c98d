"""SessionDesk: opening and closing sessions for callers, and what a request says of its turn.

Mirrors `open_session` and `close_session` of SGLang's TokenizerManager. The sessions themselves are the scheduler's.
Imports: messages, errors, and the parts of this folder it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sgviz.errors import BadRequest
from sgviz.messages import SamplingParams
from sgviz.messages.generate import new_rid
from sgviz.messages.session import (
    CloseSessionReqInput,
    CloseSessionReqOutput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    SessionParams,
    check_session_id,
)
from sgviz.tokenizer_manager.codec import TextCodec
from sgviz.tokenizer_manager.replies import Replies

ANSWER_TIMEOUT_S = 60.0  # a running scheduler answers at its next turn, which may be behind a long forward
MOST_CHARS = 2**53 - 1  # what every JSON library can say exactly
MOST_SECONDS = 10 * 365 * 86400.0


class SessionDesk:
    """What callers may ask about sessions.

    Args:
        start: begins to receive, if that is not so.
    """

    def __init__(self, replies: Replies, start: Callable[[], None]) -> None:
        self._replies = replies
        self._start = start

    async def open(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        *,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Open a session; returns its id, a fresh one if none is given.

        Args:
            capacity_of_str_len: characters that the prompt of a turn may have, its context included.
            streaming: turns follow each other, and each goes on from the one before.
            timeout: seconds without a turn after which the session closes by itself; None: never.

        Raises:
            BadRequest: a value is not allowed, or a session of that name is open.
        """
        if type(capacity_of_str_len) is not int or not 1 <= capacity_of_str_len <= MOST_CHARS:
            raise BadRequest(
                f"capacity_of_str_len must be a number of characters from 1 to {MOST_CHARS}, got "
                f"{capacity_of_str_len!r:.60}",
                param="capacity_of_str_len",
            )
        if timeout is not None and not (math.isfinite(timeout) and 0.0 < timeout <= MOST_SECONDS):
            raise BadRequest(
                f"timeout must be above 0 and at most {MOST_SECONDS:g} seconds, got {timeout}",
                param="timeout",
            )
        name = new_rid() if session_id is None else session_id
        check_session_id(name)
        self._start()
        question = OpenSessionReqInput(
            id=new_rid(),
            session_id=name,
            capacity_of_str_len=capacity_of_str_len,
            streaming=streaming,
            timeout=timeout,
        )
        reply = await self._replies.ask(question, ANSWER_TIMEOUT_S)
        assert isinstance(reply, OpenSessionReqOutput)
        if not reply.success:
            raise BadRequest(reply.message, param="session_id")
        return reply.session_id

    async def close(self, session_id: str) -> None:
        """Close a session. Turns under way end, aborted, with what they have.

        Raises:
            BadRequest: no session of that name is open.
        """
        check_session_id(session_id)
        self._start()
        question = CloseSessionReqInput(id=new_rid(), session_id=session_id)
        reply = await self._replies.ask(question, ANSWER_TIMEOUT_S)
        assert isinstance(reply, CloseSessionReqOutput)
        if not reply.success:
            raise BadRequest(reply.message, param="session_id")


def check_turn(turn: SessionParams | None, params: SamplingParams) -> None:
    """Raise BadRequest for what a turn cannot be."""
    if turn is None:
        return
    check_session_id(turn.id)
    if params.n > 1:
        raise BadRequest(
            f"n = {params.n} with session_params: a turn has one answer; send the turn {params.n} times with the "
            "same session_params.rid to branch",
            param="n",
        )


def leading_id(codec: TextCodec) -> int | None:
    """The id that the tokenizer puts before every text, if it does: in the middle of a conversation it has no place."""
    ids = codec.encode("")
    return ids[0] if ids else None
