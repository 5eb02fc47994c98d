"""Lived: seconds in which a thread ran, for limits on the silence of others. Imports: nothing of sgviz."""

from __future__ import annotations

import time
from collections.abc import Callable


class Lived:
    """Time in which this thread itself could not run (a suspended machine, a stopped process) hardly counts.

    It is taken for `longest` s at most: nobody is found silent because it was not listened to.
    """

    def __init__(self, longest: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._longest = clock, longest
        self._before, self._now = clock(), 0.0

    def now(self) -> float:
        """To be read often."""
        at = self._clock()
        self._now += min(at - self._before, self._longest)
        self._before = at
        return self._now
