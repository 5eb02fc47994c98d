"""DeviceTimer: the one timeline of a simulated device, on the wall clock or on a virtual one.

Imports: events (clocks).
"""

from __future__ import annotations

import time
from typing import Protocol

SPIN_NS = 100_000  # a sleep comes back late by up to this; the last bit is waited for awake


class DeviceTimer(Protocol):
    """Time as the device and whoever waits for it see it."""

    def now(self) -> int:
        """Nanoseconds on the host's clock."""
        ...

    def wait_until(self, ns: int) -> None:
        """Return when `now() >= ns`."""
        ...


class WallTimer:
    """Waits for real: asleep first, awake for the last tenth of a millisecond."""

    __slots__ = ()

    def now(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, ns: int) -> None:
        left = ns - time.monotonic_ns()
        if left > SPIN_NS:
            time.sleep((left - SPIN_NS) * 1e-9)
        while time.monotonic_ns() < ns:
            pass
