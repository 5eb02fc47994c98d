"""What no two requests under way may share: the rooms in which their sides meet, and their names. Imports: errors."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

from sgviz.errors import BadRequest

BITS = 63


class Rooms:
    """Hands out rooms that no request under way has. Never room 0, in which probes meet nobody."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[int] = set()  # membership only

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, count: int, ranks: int = 1, out: Collection[int] = ()) -> list[int]:
        """`count` rooms, to be given back with `free`.

        Args:
            ranks, out: of a server that spreads rooms over `ranks` (room modulo ranks), those that take nobody.
        """
        skipped = out if len(out) < ranks else ()
        return [self._one(ranks, skipped) for _ in range(count)]

    def free(self, rooms: Iterable[int]) -> None:
        self._taken.difference_update(rooms)

    def _one(self, ranks: int, skipped: Collection[int]) -> int:
        while (room := self._rng.getrandbits(BITS)) in self._taken or room == 0 or room % ranks in skipped:
            pass
        self._taken.add(room)
        return room


class Names:
    """The rids of requests under way.

    A server refuses a name that it has, and an abort ends whoever has it: here it is refused before an abort of the one
    request could meet the other.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()  # membership only

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, names: Iterable[str]) -> list[str]:
        """The names, each once, to be given back with `free`. Raises BadRequest, with none taken, if one is in use."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name in self._taken:
                raise BadRequest(
                    f"rid {name!r} is already in use; wait for its end or take another", param="rid"
                )
        self._taken.update(wanted)
        return wanted

    def free(self, names: Iterable[str]) -> None:
        self._taken.difference_update(names)


class Stay:
    """The rooms and names of one attempt, given back when it ends."""

    def __init__(self, rooms: Rooms, numbers: list[int], names: Names, rids: list[str]) -> None:
        self._rooms, self._numbers, self._names, self._rids = rooms, numbers, names, rids

    def leave(self) -> None:
        """The names are free: the client has its answer."""
        self._names.free(self._rids)
        self._rids = []

    def end(self) -> None:
        self.leave()
        self._rooms.free(self._numbers)
        self._numbers = []
