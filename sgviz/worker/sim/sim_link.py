"""SimLink: the link of a simulated GPU, on which KV takes its time beside the forwards. Nothing is copied.

A copy starts when the link is free and takes its bytes over the link's rate. Both ends of a transfer have a link, so a
transfer in pieces is slower than its bytes say by about one piece.
Imports: worker.sim.device_timer.
"""

from __future__ import annotations

from collections.abc import Callable

from sgviz.worker.sim.device_timer import DeviceTimer


class SimLink:
    """One direction of a link. Args: bandwidth in bytes/s; `timer`: that of the device."""

    def __init__(self, bandwidth: float, timer: DeviceTimer) -> None:
        self._bandwidth = bandwidth
        self._timer = timer
        self._free_at = 0

    def carry(self, size: int) -> SimCopy:
        """Put `size` bytes behind those under way."""
        start = max(self._timer.now(), self._free_at)
        self._free_at = start + round(size / self._bandwidth * 1e9)
        return SimCopy(self._timer, start, self._free_at)


class SimCopy:
    """A copy on the link; satisfies `worker.protocol.KVCopy`."""

    __slots__ = ("_end", "_start", "_timer")

    def __init__(self, timer: DeviceTimer, start: int, end: int) -> None:
        self._timer = timer
        self._start = start
        self._end = end

    def done(self) -> bool:
        return self._timer.now() >= self._end

    def on_done(self, call: Callable[[], None]) -> None:
        """Only the clock knows when it is done: whoever waits looks at it now and then."""

    def result(self) -> tuple[int, int]:
        self._timer.wait_until(self._end)
        return self._start, self._end
