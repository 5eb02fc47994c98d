"""Clocks. Scheduler, cache and tracer never call `time` themselves: they are given one of these.

Times are integers in nanoseconds. `WallClock` reads the system-wide monotonic clock, so stamps taken
in different processes of one machine can be compared; `anchor()` ties it to calendar time.
"""

from __future__ import annotations

import time
from typing import Protocol

ANCHOR_READINGS = 5


class Clock(Protocol):
    def now(self) -> int:
        """Nanoseconds since an arbitrary, fixed origin; never falls."""
        ...


class WallClock:
    """The monotonic clock of this machine."""

    __slots__ = ()

    def now(self) -> int:
        return time.monotonic_ns()

    @staticmethod
    def anchor() -> tuple[int, int]:
        """`(unix_ns, monotonic_ns)` read together, to turn monotonic stamps into calendar time.

        Of a few readings the quickest: a busy machine may put the thread off between two clocks.
        """
        readings = [
            (time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(ANCHOR_READINGS)
        ]
        before, unix_ns, after = min(readings, key=lambda each: each[2] - each[0])
        return unix_ns, (before + after) // 2


class OtherHostClock:
    """The monotonic clock of another machine, as far as it is known: `shift_ns` ahead of the one here."""

    __slots__ = ("shift_ns",)

    def __init__(self, shift_ns: int) -> None:
        self.shift_ns = shift_ns

    def now(self) -> int:
        return time.monotonic_ns() + self.shift_ns

    def anchor(self) -> tuple[int, int]:
        """As WallClock's, of this machine's calendar."""
        unix_ns, monotonic_ns = WallClock.anchor()
        return unix_ns, monotonic_ns + self.shift_ns


HostClock = WallClock | OtherHostClock


class VirtualClock:
    """A clock that moves only when told to: for tests, replays and simulated devices."""

    __slots__ = ("_now",)

    def __init__(self, start: int = 0) -> None:
        self._now = start

    def now(self) -> int:
        return self._now

    def advance(self, ns: int) -> None:
        """Move forward by `ns` nanoseconds (never backwards)."""
        if ns < 0:
            raise ValueError(f"a clock cannot go back: advance({ns})")
        self._now += ns
