"""Lobby: rooms of which the prefill side has met only one of the two who belong there.

Either a decode rank named the room before its request came here, or one of the two ended before the other was heard
of; then the other is told as soon as it comes. A note is used up once, and forgotten after the bootstrap timeout.
Imports: disaggregation (wire).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sgviz.disaggregation.wire import Abort, Destination, Hello


class Refusal(NamedTuple):
    """`status`: as an answer's."""

    why: str
    status: int


@dataclass(slots=True)
class Early:
    """What a decode rank said of a room before the request came."""

    identity: bytes
    hello: Hello
    since_ns: int
    destination: Destination | None = None


class Lobby:
    """Of one prefill rank."""

    def __init__(self) -> None:
        self._early: dict[int, Early] = {}
        self._ended: dict[int, tuple[Refusal, int]] = {}  # here, before the decode side came
        self._left: dict[int, tuple[Refusal, int]] = {}  # there, before the request came

    def greet(self, identity: bytes, hello: Hello, now: int) -> Refusal | None:
        """A decode rank names a room that no request has; what it is refused for, if it is."""
        ended = self._ended.pop(hello.room, None)
        if ended is not None:
            return ended[0]
        if hello.room in self._early:
            return Refusal(f"bootstrap_room {hello.room}: the room is taken by another request", 400)
        self._early[hello.room] = Early(identity, hello, now)
        return None

    def destine(self, identity: bytes, message: Destination) -> bool:
        """Where its KV goes; says whether the room is that rank's."""
        early = self._of(identity, message)
        if early is None:
            return False
        early.destination = message
        return True

    def leave(self, identity: bytes, message: Abort, now: int) -> None:
        """It does not wait any more."""
        if self._of(identity, message) is not None:
            del self._early[message.room]
            self._left[message.room] = Refusal(message.why, message.status), now

    def come(self, room: int) -> Early | Refusal | None:
        """The request is here: the decode rank that waits for it, or why it left."""
        self._ended.pop(room, None)
        left = self._left.pop(room, None)
        return self._early.pop(room, None) or (left[0] if left is not None else None)

    def end(self, room: int, refusal: Refusal, now: int) -> None:
        """A request ended here before its decode side came."""
        self._ended[room] = refusal, now

    def lose(self, identity: bytes) -> None:
        """That decode rank is gone."""
        self._early = {room: each for room, each in self._early.items() if each.identity != identity}

    def overdue(self, now: int, limit_ns: int) -> list[Early]:
        """Those who have waited for too long; they are out, and old notes too."""
        late = [each for each in self._early.values() if now - each.since_ns > limit_ns]
        for each in late:
            del self._early[each.hello.room]
        for notes in (self._ended, self._left):
            for room in [room for room, (_, since) in notes.items() if now - since > limit_ns]:
                del notes[room]
        return late

    def _of(self, identity: bytes, message: Destination | Abort) -> Early | None:
        early = self._early.get(message.room)
        named = early is not None and (early.identity, early.hello.key) == (identity, message.key)
        return early if named else None
