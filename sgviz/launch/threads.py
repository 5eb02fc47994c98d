"""Children as threads of this process: the same components and sockets, over inproc.

The interpreter's switch interval is short while such an engine runs: at the default 5 ms every small torch
operator of the worker's thread would wait for the interpreter lock behind the scheduler's. Imports: launch.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from queue import Empty, Queue

from sgviz.errors import StartupError
from sgviz.launch.components import COMPONENTS, Context
from sgviz.launch.messages import InitInfo

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 50e-6
OnDeath = Callable[[str, int], None]


class ChildThread:
    """One component in a thread."""

    def __init__(self, component: str, context: Context) -> None:
        self.component = component
        self._outcome: Queue[InitInfo | BaseException] = Queue()
        self._on_death: OnDeath | None = None
        self._thread = threading.Thread(target=self._run, args=(context,), name=f"sgviz-{component}", daemon=True)
        self._failed = False
        self._thread.start()

    def _run(self, context: Context) -> None:
        try:
            COMPONENTS[self.component](context, self._outcome.put)
        except BaseException as error:
            self._failed = True
            self._outcome.put(error)
            log.debug("%s failed", self.component, exc_info=True)
            if self._on_death is not None:
                log.critical("%s died", self.component, exc_info=True)
        if self._on_death is not None:
            self._on_death(self.component, int(self._failed))

    def wait_ready(self, timeout: float) -> InitInfo:
        """The component's init info; StartupError if it fails or takes longer than `timeout` seconds."""
        try:
            outcome = self._outcome.get(timeout=timeout)
        except Empty:
            raise StartupError(f"the {self.component} thread did not get ready in {timeout:.0f} s") from None
        if isinstance(outcome, BaseException):
            message = f"the {self.component} could not start: {type(outcome).__name__}: {outcome}"
            raise StartupError(message) from outcome
        return outcome

    def watch(self, on_death: OnDeath) -> None:
        self._on_death = on_death

    def stop(self, timeout: float) -> bool:
        """Wait for the thread to leave its loop; says whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


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
