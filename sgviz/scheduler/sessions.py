"""Sessions: conversations whose turns go on from each other's ids, kept where the turns run. Mirrors SGLang's
SessionController (facts 9).

A new turn's prompt is built here, from the ids of the turn it goes on from, so the prefix is the same token for
token and the prefix cache has it. Simplified: a streaming session keeps no KV of its own, the prefix cache does.
Beyond SGLang: closing a session that is not open is told, the capacity is kept to, and there may be so many at once.
Imports: messages, events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from sgviz.batch.req import Req
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import schema
from sgviz.messages import TokenizedGenerateReqInput
from sgviz.messages.generate import MAX_TOKEN_CHARS
from sgviz.messages.logprob_start import settle_start
from sgviz.messages.session import (
    CloseSessionReqInput,
    CloseSessionReqOutput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    SessionReply,
)
from sgviz.scheduler.finish import Decode
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.session_tree import Node, Session, Turn, context_of, parent_of
from sgviz.scheduler.state import SchedulerState

log = logging.getLogger(__name__)

REAP_EVERY_NS = 1_000_000_000
MOST_OPEN = 4096  # sessions; what they keep is theirs until somebody closes them


class Answers(Protocol):
    """Where replies go."""

    def send(self, message: SessionReply) -> None: ...


class Sessions:
    """The open sessions of one scheduler.

    Args:
        decode: token ids to text, for the capacity.
    """

    def __init__(
        self, state: SchedulerState, ender: RequestEnder, to_tokenizer: Answers, decode: Decode
    ) -> None:
        self._state = state
        self._ender = ender
        self._to_tokenizer = to_tokenizer
        self._decode = decode
        self._open: dict[str, Session] = {}
        self._reaped_ns = state.clock.now()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What to do with each message about sessions."""
        return {OpenSessionReqInput: self._on_open, CloseSessionReqInput: self._on_close}

    def _on_open(self, message: OpenSessionReqInput) -> None:
        name = message.session_id
        fault = self.open(name, message.capacity_of_str_len, message.streaming, message.timeout)
        self._to_tokenizer.send(
            OpenSessionReqOutput(id=message.id, session_id=name, success=not fault, message=fault)
        )

    def _on_close(self, message: CloseSessionReqInput) -> None:
        fault = self.close(message.session_id, "asked for")
        self._to_tokenizer.send(CloseSessionReqOutput(id=message.id, success=not fault, message=fault))

    def open(self, session_id: str, capacity: int, streaming: bool, timeout: float | None) -> str:
        """Open a session; an empty string, or why it was not done."""
        if session_id in self._open:
            return f"a session {session_id!r} is open already; close it first, or give another session_id"
        if len(self._open) >= MOST_OPEN:
            return f"{len(self._open)} sessions are open, which is the limit; close one, or open them with a timeout"
        now = self._state.clock.now()
        timeout_ns = None if timeout is None else round(timeout * 1e9)
        self._open[session_id] = Session(session_id, capacity, streaming, timeout_ns, now)
        if self._state.trace.on:
            body = schema.SessionOpened(
                session_id=session_id, capacity=capacity, streaming=streaming, timeout_s=timeout
            )
            self._state.trace.emit(body)
        return ""

    def close(self, session_id: str, why: str) -> str:
        """Forget a session, and end what is under way in it; an empty string, or why it was not done."""
        session = self._open.pop(session_id, None)
        if session is None:
            return f"no session {session_id!r} is open"
        session.look()
        for node in session.under_way:
            self._end(node, f"its session was closed: {why}")
        if self._state.trace.on:
            self._state.trace.emit(schema.SessionClosed(session_id=session_id, turns=session.turns, why=why))
        return ""

    def close_all(self, why: str) -> None:
        for session_id in tuple(self._open):
            self.close(session_id, why)

    def reap(self) -> None:
        """Close those that have been idle for longer than they may; looks at most once a second."""
        now = self._state.clock.now()
        if not self._open or now - self._reaped_ns < REAP_EVERY_NS:
            return
        self._reaped_ns = now
        for session in tuple(self._open.values()):
            session.look()
            if session.under_way:
                session.last_ns = now
            elif session.timeout_ns is not None and now - session.last_ns > session.timeout_ns:
                self.close(session.id, f"idle for {(now - session.last_ns) / 1e9:.1f} s")

    # ------------------------------------------------------------ turns

    def turn(self, message: TokenizedGenerateReqInput) -> Turn | None:
        """What the request would be a turn of, with its whole prompt; None: of nothing. Changes no session.

        Raises:
            BadRequest: no such session or turn, one that is under way, more text than the session may have, or a
                logprob_start_len outside the whole prompt. SgvizError: the tokenizer cannot tell how much text it is.
        """
        params = message.session_params
        if params is None:
            return None
        session = self._open.get(params.id)
        if session is None:
            raise BadRequest(f"no session {params.id!r} is open", param="session_params.id")
        session.look()
        parent = parent_of(session, params)
        context = context_of(parent, params) if parent is not None else []
        new = message.input_ids
        if context and new[0] == message.bos_token_id:
            new = new[1:]
        ids = context + new
        start = settle_start(
            message.logprob_start_len,
            len(ids),
            message.top_logprobs_num,
            len(message.token_ids_logprob or ()),
        )
        self._check_capacity(session, ids)
        whole = msgspec.structs.replace(message, input_ids=ids, logprob_start_len=start)
        return Turn(session, params, parent, len(context), whole)

    def begin(self, turn: Turn, req: Req) -> None:
        """The request was taken: it is a turn of its session from now on."""
        session, params, parent = turn.session, turn.params, turn.parent
        forgotten = self._forget(turn) if params.replace else 0
        session.add(turn, req)
        session.last_ns = self._state.clock.now()
        if self._state.trace.on:
            self._state.trace.emit(
                schema.SessionTurn(
                    rid=req.rid, session_id=session.id, parent=parent.rid if parent is not None else "",
                    context_tokens=turn.context, new_tokens=len(req.origin_input_ids) - turn.context,
                    offset=params.offset or 0, replace=params.replace, forgotten=forgotten,
                    drop_previous_output=params.drop_previous_output,
                )
            )  # fmt: skip

    def _check_capacity(self, session: Session, ids: list[int]) -> None:
        if len(ids) * MAX_TOKEN_CHARS <= session.capacity:
            return
        try:
            chars = len(self._decode(ids, False))
        except Exception as error:
            log.exception("the text of a turn of session %s cannot be counted", session.id)
            raise SgvizError(
                f"the prompt of this turn could not be decoded to count its characters: {type(error).__name__}: {error}"
            ) from error
        if chars > session.capacity:
            raise BadRequest(
                f"the prompt of this turn has {chars} characters with its context; session {session.id!r} was opened "
                f"with capacity_of_str_len {session.capacity}",
                param="session_params.id",
            )

    def _forget(self, turn: Turn) -> int:
        """What the turn replaces: everything, or what came after its parent (which ends, if it runs)."""
        session, parent = turn.session, turn.parent
        gone = list(session.nodes.values()) if parent is None else parent.below()
        for node in gone:
            if session.nodes.get(node.rid) is node:
                del session.nodes[node.rid]
        if parent is not None:
            parent.children.clear()
        for node in gone if parent is None else [parent, *gone]:
            self._end(node, f"turn {turn.message.rid} of its session replaced it")
        session.look()
        return len(gone)

    def _end(self, node: Node, why: str) -> None:
        req = node.req
        if req is not None and self._state.live.get(node.rid) is req:
            self._ender.abort(node.rid, why)
