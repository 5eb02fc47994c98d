"""Watchdog: a thread that notices when a loop does not come round any more, and the stacks that say where it is.

Mirrors SGLang's scheduler watchdog. What is watched makes no clock calls for it: the watchdog reads a turn
number now and then and measures on its own thread. Time in which this thread itself could not run (a
suspended machine, a stopped process) does not count. Imports: nothing of sgviz.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

CHECKS = 10  # looks within one timeout
LONGEST_PAUSE_S = 5.0


class Progress(NamedTuple):
    """What a loop tells of itself: the number of its turn, and whether there is work it must get through."""

    turn: int
    busy: bool


class Watchdog:
    """Calls `on_stuck(why)` once, from its own thread, when a busy loop stays in one turn for `timeout` seconds.

    Args:
        progress: read from the watchdog's thread; must neither block nor change anything.
    """

    def __init__(
        self, name: str, progress: Callable[[], Progress], timeout: float, on_stuck: Callable[[str], None]
    ) -> None:
        self._name = name
        self._progress = progress
        self._timeout = timeout
        self._on_stuck = on_stuck
        self._paused = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sgviz-watchdog-{name}", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop counting: somebody holds the loop on purpose."""
        self._paused.set()

    def resume(self) -> None:
        """Count again, from zero."""
        self._paused.clear()

    def stop(self) -> None:
        """End the thread; harmless if it has ended."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        pause = min(self._timeout / CHECKS, LONGEST_PAUSE_S)
        turn, still, before = -1, 0.0, time.monotonic()
        while not self._ended.wait(pause):
            now = time.monotonic()
            passed, before = min(now - before, 2 * pause), now
            seen = self._progress()
            if not seen.busy or seen.turn != turn or self._paused.is_set():
                turn, still = seen.turn, 0.0
                continue
            still += passed
            if still >= self._timeout:
                self._on_stuck(
                    f"no progress for {self._timeout:g} s (watchdog_timeout) in turn {turn} of the {self._name}'s loop"
                )
                return


def stacks() -> str:
    """Where every thread of this process is now, newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
