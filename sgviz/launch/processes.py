"""Children as processes: start, wait for ready, watch, stop. Nothing is left behind, however it ends.

Imports: launch.messages, errors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import sgviz
from sgviz.errors import StartupError
from sgviz.launch.messages import BootMessage, FailedStart, InitInfo, Ready, frame, read_frame

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.1

OnDeath = Callable[[str, int], None]


class ChildProcess:
    """One component in an interpreter of its own. It leads a session of its own, so Ctrl-C passes it by."""

    def __init__(self, boot: BootMessage) -> None:
        self.component = boot.component
        read_fd, write_fd = os.pipe()
        self._ready = os.fdopen(read_fd, "rb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgviz.launch.child", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=_stderr_fd(),
                pass_fds=(write_fd,),
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; wait_ready tells
            self._process.stdin.write(frame(boot))
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait_ready(self, deadline: float) -> InitInfo:
        """The child's init info; StartupError if it fails, dies or takes longer than `deadline` (monotonic s)."""
        while not select.select([self._ready], [], [], POLL_S)[0]:
            if time.monotonic() > deadline:
                raise StartupError(f"the {self.component} process (pid {self.pid}) did not get ready in time")
        try:
            message = msgspec.msgpack.decode(read_frame(self._ready), type=Ready | FailedStart)
        except StartupError:
            code = self._process.wait()
            raise StartupError(
                f"the {self.component} process died while starting ({describe_exit(code)})"
            ) from None
        finally:
            self._ready.close()
        if isinstance(message, FailedStart):
            log.debug("%s", message.traceback)
            raise StartupError(f"the {message.component} could not start: {message.message}")
        return message.info

    def watch(self, on_death: OnDeath) -> None:
        """Call `on_death(component, exit code)` from a thread when the process ends."""

        def wait() -> None:
            on_death(self.component, self._process.wait())

        threading.Thread(target=wait, name=f"watch-{self.component}", daemon=True).start()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """Wait for the process to leave by itself, then terminate, then kill. Returns the exit code."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("the %s process (pid %d) did not leave by itself", self.component, self.pid)
        return self.kill()

    def kill(self) -> int:
        """End it now."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Close the pipes (the lifeline too, so a child that still lives leaves)."""
        self._ready.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def describe_exit(code: int) -> str:
    """`exit code 1` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    import signal

    return f"signal {signal.Signals(-code).name}"


def _environment() -> dict[str, str]:
    """The parent's, with this very sgviz importable (a checkout need not be installed)."""
    root = str(Path(sgviz.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root + (os.pathsep + path if path else "")}


def _stderr_fd() -> int:
    """Children never write to the parent's standard output, which may be somebody's JSON."""
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL
    except (OSError, ValueError):
        return subprocess.DEVNULL
