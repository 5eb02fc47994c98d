"""Rooms of which one side has come: who comes second learns of the first, or why it is gone; each note counts once."""

from __future__ import annotations

from sgviz.disaggregation.lobby import Early, Lobby, Refusal
from sgviz.disaggregation.wire import Abort, Destination, Hello

S = 10**9


def hello(room: int, key: str = "k") -> Hello:
    return Hello(room=room, key=key, carrier="tcp")


def destination(room: int, key: str = "k") -> Destination:
    return Destination(room=room, key=key, prefix_len=0, tokens=5)


def test_who_came_first_is_found_once() -> None:
    lobby = Lobby()
    assert lobby.greet(b"d", hello(1), 5) is None and lobby.destine(b"d", destination(1))
    early = lobby.come(1)
    assert isinstance(early, Early) and early.destination == destination(1) and early.since_ns == 5
    assert lobby.come(1) is None and not lobby.destine(b"d", destination(1))


def test_a_room_has_place_for_one() -> None:
    lobby = Lobby()
    lobby.greet(b"d", hello(1), 0)
    refusal = lobby.greet(b"e", hello(1, "other"), 0)
    assert refusal is not None and refusal.status == 400 and "taken" in refusal.why
    assert not lobby.destine(b"e", destination(1, "other"))
    lobby.leave(b"e", Abort(room=1, key="other", why="no"), 0)
    assert isinstance(lobby.come(1), Early)


def test_what_ended_on_one_side_is_told_to_the_other_once() -> None:
    lobby = Lobby()
    lobby.end(1, Refusal("too long", 400), 0)
    assert lobby.greet(b"d", hello(1), 0) == Refusal("too long", 400)
    assert lobby.greet(b"d", hello(1), 0) is None
    lobby.leave(b"d", Abort(room=1, key="k", why="no more", status=503), 0)
    assert lobby.come(1) == Refusal("no more", 503)
    assert lobby.come(1) is None


def test_a_new_request_forgets_the_end_of_the_one_before() -> None:
    lobby = Lobby()
    lobby.end(1, Refusal("gone", 500), 0)
    assert lobby.come(1) is None
    assert lobby.greet(b"d", hello(1), 0) is None


def test_after_the_limit_nobody_waits_and_no_note_is_left() -> None:
    lobby = Lobby()
    lobby.greet(b"d", hello(1), 0)
    lobby.greet(b"d", hello(2), 5 * S)
    lobby.end(3, Refusal("gone", 500), 0)
    lobby.greet(b"d", hello(4), 0)
    lobby.leave(b"d", Abort(room=4, key="k", why="no"), 0)
    assert [each.hello.room for each in lobby.overdue(11 * S, 10 * S)] == [1]
    assert lobby.come(1) is None and lobby.come(4) is None and lobby.greet(b"d", hello(3), 0) is None
    assert isinstance(lobby.come(2), Early)


def test_a_rank_that_is_lost_waits_for_nobody() -> None:
    lobby = Lobby()
    lobby.greet(b"d", hello(1), 0)
    lobby.greet(b"e", hello(2), 0)
    lobby.lose(b"d")
    assert lobby.come(1) is None and isinstance(lobby.come(2), Early)
