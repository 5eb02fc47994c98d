"""rec.sessions: one row a turn, and a row for a session that had none."""

from __future__ import annotations

from sgviz.events.schema import Event, SessionClosed, SessionOpened, SessionTurn
from sgviz.recording.sessions import sessions_table


def test_turns_in_order_with_their_sessions_ends() -> None:
    bodies = [
        SessionOpened(session_id="s", capacity=9),
        SessionOpened(session_id="unused", capacity=9),
        SessionTurn(rid="a", session_id="s", parent="", context_tokens=0, new_tokens=5),
        SessionTurn(rid="b", session_id="s", parent="a", context_tokens=9, new_tokens=2, offset=9),
        SessionTurn(rid="x", session_id="old", parent="w", context_tokens=4, new_tokens=1),
        SessionClosed(session_id="s", turns=2, why="asked for"),
    ]
    events = [Event(n, n * 1_000_000, "scheduler", 1, body) for n, body in enumerate(bodies, 1)]
    table = sessions_table(events, 0)
    assert [tuple(row) for row in table[["session", "turn", "rid", "parent", "context", "own"]].values] == [
        ("s", 1, "a", "", 0, 5),
        ("unused", 0, "", "", 0, 0),
        ("s", 2, "b", "a", 9, 2),
        ("old", 1, "x", "w", 4, 1),
    ]
    assert list(table.loc[table["session"] == "s", "closed_ms"]) == [6.0, 6.0]
    assert table.set_index("session").loc["unused", "closed_because"] == ""
    assert table["closed_ms"].isna().sum() == 2 and list(table["opened_ms"])[:2] == [1.0, 2.0]
    assert sessions_table([], 0).empty
