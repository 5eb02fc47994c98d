"""The sessions of a run as a table, and how their turns hang together. Mirrors nothing of SGLang, which logs them.

Imports: events, pandas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from sgviz.events.schema import Event, SessionClosed, SessionOpened, SessionTurn

NS_PER_MS = 1e6
COLUMNS = ("session", "turn", "rid", "parent", "t_ms", "context", "own", "offset", "dropped_output", "forgotten",
           "opened_ms", "closed_ms", "closed_because")  # fmt: skip


@dataclass(slots=True)
class _Life:
    """One session from opening to closing (monotonic ns; 0: not seen)."""

    opened: int = 0
    closed: int = 0
    why: str = ""
    turns: int = 0


def sessions_table(events: Iterable[Event], t0: int) -> pd.DataFrame:
    """One row a turn, in order; a session without turns has one row without a `rid`.

    `context` ids came from `parent` ("": it began anew), `own` from the request; `forgotten`: turns it replaced.
    Times end in `_ms` and count from the first event (NaN: not seen, or still open).
    """
    lives: dict[str, _Life] = {}
    rows: list[tuple[_Life, str, int, int, SessionTurn | None]] = []
    empty: dict[str, int] = {}
    for event in events:
        body = event.body
        if isinstance(body, SessionOpened):
            lives[body.session_id] = _Life(opened=event.t)
            empty[body.session_id] = len(rows)
            rows.append((lives[body.session_id], body.session_id, 0, 0, None))
        elif isinstance(body, SessionTurn):
            life = lives.setdefault(body.session_id, _Life())
            life.turns += 1
            turn = (life, body.session_id, life.turns, event.t, body)
            place = empty.pop(body.session_id, None)
            if place is None:
                rows.append(turn)
            else:
                rows[place] = turn
        elif isinstance(body, SessionClosed):
            life = lives.setdefault(body.session_id, _Life())
            life.closed, life.why = event.t, body.why
    return pd.DataFrame([_row(*row, t0) for row in rows], columns=list(COLUMNS))


def _row(
    life: _Life, session: str, number: int, t: int, turn: SessionTurn | None, t0: int
) -> tuple[object, ...]:
    ends = (_ms(life.opened, t0), _ms(life.closed, t0), life.why)
    if turn is None:
        return session, 0, "", "", math.nan, 0, 0, 0, False, 0, *ends
    return (
        session, number, turn.rid, turn.parent, _ms(t, t0), turn.context_tokens, turn.new_tokens, turn.offset,
        turn.drop_previous_output, turn.forgotten, *ends,
    )  # fmt: skip


def _ms(t: int, t0: int) -> float:
    return (t - t0) / NS_PER_MS if t else math.nan
