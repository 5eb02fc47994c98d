"""Events of sessions: opened, closed, and where the ids of a turn came from. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body


class SessionOpened(Body, frozen=True, tag="session.opened"):
    """A session was opened: a turn's prompt may have `capacity` characters; `timeout_s`: idle seconds it may have."""

    session_id: str
    capacity: int
    streaming: bool = False
    timeout_s: float | None = None


class SessionClosed(Body, frozen=True, tag="session.closed"):
    """The session and its `turns` are forgotten (`why`: asked for, idle too long, the engine stops)."""

    session_id: str
    turns: int
    why: str


class SessionTurn(Body, frozen=True, tag="session.turn"):
    """The request is a turn of the session: `context_tokens` ids of the turn `parent` ("": none), `new_tokens` own.

    `offset`: the context was cut there (0: it was not); `drop_previous_output`: it is without what the parent
    generated; `replace`: what came after the parent (or all) was forgotten, `forgotten` turns.
    """

    rid: str
    session_id: str
    parent: str
    context_tokens: int
    new_tokens: int
    offset: int = 0
    replace: bool = False
    forgotten: int = 0
    drop_previous_output: bool = False
