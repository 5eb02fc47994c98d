"""StreamCopy: a copy of KV under way on a stream. Imports: nothing of the package."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future


class StreamCopy:
    """Satisfies `worker.protocol.KVCopy`; what the stream's closure gives is when it began and ended."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def on_done(self, call: Callable[[], None]) -> None:
        """`call` when it is done, on the stream's thread; at once if it is."""
        self._future.add_done_callback(lambda _: call())

    def result(self) -> tuple[int, int]:
        """Wait for it: when it began and ended (monotonic ns). Raises what it raised."""
        return self._future.result()


def timed(copy: Callable[[], None]) -> tuple[int, int]:
    """Run `copy`; when it began and ended (monotonic ns)."""
    start = time.monotonic_ns()
    copy()
    return start, time.monotonic_ns()
