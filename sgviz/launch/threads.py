"""Children as threads of this process: the same components and sockets, over inproc.

The interpreter's switch interval is short while such an engine runs: at the default 5 ms every small torch
operator of the worker's thread would wait for the interpreter lock behind the scheduler's. Imports: launch.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, Queue

from sgviz.errors import StartupError
from sgviz.launch.components import Context, run_component
from sgviz.launch.messages import SWITCH_INTERVAL_S, InitInfo
from sgviz.launch.watchdog import stacks

log = logging.getLogger(__name__)

OnDeath = Callable[[str, str], None]  # component, why
Outcomes = Queue[tuple[str, InitInfo | BaseException]]


class ChildThread:
    """One component in a thread.

    Args:
        outcomes: gets the init info or what was raised; `wait_ready` reads it.
    """

    def __init__(self, component: str, context: Context, outcomes: Outcomes) -> None:
        self.component = component
        self._outcomes = outcomes
        self._on_death: OnDeath | None = None
        self._leave = threading.Event()
        context = replace(context, give_up=self._stuck)
        self._thread = threading.Thread(
            target=self._run, args=(context,), name=f"sgviz-{component}", daemon=True
        )
        self._thread.start()

    def _run(self, context: Context) -> None:
        why = "its loop ended"
        try:
            run_component(self.component, context, self._ready)
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self._outcomes.put((self.component, error))
            log.debug("%s failed", self.component, exc_info=True)
            if self._on_death is not None:
                log.critical("%s died", self.component, exc_info=True)
        if self._on_death is not None:
            self._on_death(self.component, why)

    def _ready(self, info: InitInfo) -> None:
        if self._leave.is_set():
            raise StartupError("the engine was given up while this component was starting")
        self._outcomes.put((self.component, info))

    def _stuck(self, why: str) -> None:
        """A thread cannot be ended from outside: say where all are, and let the engine be given up."""
        log.critical("%s gives up: %s\n%s", self.component, why, stacks())
        if self._on_death is not None:
            self._on_death(self.component, why)

    def watch(self, on_death: OnDeath) -> None:
        """Call `on_death(component, why)` when the thread leaves its loop or is stuck in it."""
        self._on_death = on_death

    def leave(self) -> None:
        """A thread that is still starting ends as soon as it has loaded; it hears no message before that."""
        self._leave.set()

    def stop(self, timeout: float) -> bool:
        """Wait for the thread to leave its loop; says whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def wait_ready(children: Sequence[ChildThread], outcomes: Outcomes, timeout: float) -> dict[str, InitInfo]:
    """The init info of all, by component.

    Raises:
        StartupError: one failed (told at once), or took longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    infos: dict[str, InitInfo] = {}
    while late := [child.component for child in children if child.component not in infos]:
        try:
            component, outcome = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise StartupError(
                f"the {late[0]} thread did not get ready within {timeout:g} s (startup_timeout)"
            ) from None
        if isinstance(outcome, BaseException):
            message = f"the {component} could not start: {type(outcome).__name__}: {outcome}"
            raise StartupError(message) from outcome
        infos[component] = outcome
    return infos


class SwitchInterval:
    """Counts the engines that want a short switch interval; the last one restores what was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    def take(self) -> None:
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before))
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._before)


# the interval belongs to the interpreter, so the count of its users does too
switch_interval = SwitchInterval()
