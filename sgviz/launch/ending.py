"""The end of the children: time to leave by themselves, together, and then an end that nothing can hold up.

SGLang waits 15 s after its ShutdownReq and kills the tree. Imports: launch.processes, launch.threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from sgviz.launch.processes import ChildProcess
from sgviz.launch.threads import ChildThread

log = logging.getLogger(__name__)

TERMINATE_S = 1.0  # between asking a process to end and ending it


def end_processes(children: Sequence[ChildProcess], patience: float) -> list[str]:
    """End all and close their pipes; says who did not leave by itself within `patience` seconds (for all together)."""
    deadline = time.monotonic() + patience
    late = [child for child in children if not child.wait(max(0.0, deadline - time.monotonic()))]
    for child in late:
        if patience:
            log.warning("the %s process (pid %d) did not leave by itself", child.component, child.pid)
        child.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for child in late:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            child.kill()  # stopped processes end by nothing less
    for child in children:
        child.close()
    return [child.component for child in late]


def end_threads(children: Sequence[ChildThread], patience: float) -> list[str]:
    """Wait for all; says who did not leave within `patience` seconds (for all together) and is left as it is."""
    deadline = time.monotonic() + patience
    late = [child.component for child in children if not child.stop(max(0.0, deadline - time.monotonic()))]
    for component in late:
        log.error("the %s thread did not leave its loop", component)
    return late
