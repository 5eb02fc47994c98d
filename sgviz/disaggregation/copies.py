"""Copies: what is being copied between the pool and where a piece stands, taken up in the order in which it began.

The worker copies on its stream, so what began first is done first, and what comes to nothing waits its turn.
Imports: events (clock), worker protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sgviz.events.clock import Clock
from sgviz.worker.protocol import KVCopy

T = TypeVar("T")
Times = tuple[int, int]  # when a copy began and ended, in ns of the clock


class Copies(Generic[T]):
    """Those under way, each with what it is for. `ring`: called on any thread when one is done."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock, self._ring = clock, ring
        self._under_way: deque[tuple[T, KVCopy | None]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[T]:
        return (each for each, _ in self._under_way)

    def add(self, each: T, copy: KVCopy | None) -> None:
        """`copy`: None: there are no bytes to copy."""
        if copy is not None:
            copy.on_done(self._ring)
        self._under_way.append((each, copy))

    def over(self, *, wait: bool = False) -> Iterator[tuple[T, Times | Exception]]:
        """Take out those that are done, with their times or what went wrong. `wait`: for all of them."""
        while self._under_way:
            each, copy = self._under_way[0]
            if copy is not None and not wait and not copy.done():
                return
            self._under_way.popleft()
            yield each, self._outcome(copy)

    def _outcome(self, copy: KVCopy | None) -> Times | Exception:
        if copy is None:
            return (self._clock.now(),) * 2
        try:
            return copy.result()
        except Exception as error:
            return error
