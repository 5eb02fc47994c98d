"""Children as processes: start, wait for ready, watch, stop. Nothing is left behind, however it ends.

Imports: launch.messages, errors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

import sgviz
from sgviz.errors import StartupError
from sgviz.launch.messages import (
    BootMessage,
    Died,
    ExitCode,
    FailedStart,
    InitInfo,
    Ready,
    frame,
    read_frame,
)

log = logging.getLogger(__name__)

POLL_S = 0.1
# torch and oneDNN keep a compiled kernel for each length of a batch, 1024 of them: hundreds of MB, of which a server
# that meets another length with each prompt has nothing
KEPT_KERNELS = MappingProxyType({"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"})
# how often OpenMP's threads look for work before they sleep: by default for milliseconds, in which they keep each other
# from the cores when anything else runs beside them; too short, and each small operator begins with waking them
# (benchmarks/LOG.md has both prices)
SPINS = MappingProxyType({"GOMP_SPINCOUNT": "4000"})

OnDeath = Callable[[str, str], None]  # component, how and why
MEANINGS = {ExitCode.PARENT_GONE: "its parent had gone", ExitCode.STUCK: "ended by its watchdog"}


class ChildProcess:
    """One component in an interpreter of its own. It leads a session of its own, so Ctrl-C passes it by."""

    def __init__(self, boot: BootMessage, fds: Sequence[int] = ()) -> None:
        """`fds`: files that it inherits, under their numbers."""
        self.component = boot.component
        read_fd, write_fd = os.pipe()
        self._report = os.fdopen(read_fd, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgviz.launch.child", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=_stderr_fd(),
                pass_fds=(write_fd, *fds),
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; read_ready tells
            self._process.stdin.write(frame(boot))
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def fileno(self) -> int:
        """The pipe from the child, for `select`: readable when it is ready, failed or dead."""
        return self._report.fileno()

    def read_ready(self) -> InitInfo:
        """What the child says first. StartupError if it failed or died."""
        try:
            message = msgspec.msgpack.decode(read_frame(self._report), type=Ready | FailedStart)
        except StartupError:
            how = describe_exit(self._process.wait())
            raise StartupError(f"the {self.component} process died while starting ({how})") from None
        if isinstance(message, FailedStart):
            log.debug("%s", message.traceback)
            raise StartupError(f"the {message.component} could not start: {message.message}")
        return message.info

    def watch(self, on_death: OnDeath) -> None:
        """Call `on_death(component, how)` from a thread when the process ends."""

        def wait() -> None:
            how = describe_exit(self._process.wait())
            why = self._last_words()
            on_death(self.component, f"{how}: {why}" if why else how)

        threading.Thread(target=wait, name=f"watch-{self.component}", daemon=True).start()

    def _last_words(self) -> str:
        """Why the dead process ended, if it could say."""
        try:
            if select.select([self], [], [], 0)[0]:
                return msgspec.msgpack.decode(read_frame(self._report), type=Died).why
        except (OSError, ValueError, StartupError):
            pass  # it was killed, or the pipe is closed because we are stopping
        return ""

    def wait(self, timeout: float) -> bool:
        """Wait for the process to end; says whether it did within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it now, whatever state it is in."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes (the lifeline too, so a child that still lives leaves)."""
        self._report.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def wait_ready(children: Sequence[ChildProcess], timeout: float) -> dict[str, InitInfo]:
    """The init info of all, by component.

    Raises:
        StartupError: one failed or died (told at once, whatever the others do), or took longer than `timeout` s.
    """
    deadline = time.monotonic() + timeout
    infos: dict[str, InitInfo] = {}
    while waiting := [child for child in children if child.component not in infos]:
        for child in select.select(waiting, [], [], POLL_S)[0]:
            infos[child.component] = child.read_ready()
        late = next((child for child in waiting if child.component not in infos), None)
        if late is not None and time.monotonic() > deadline:
            raise StartupError(
                f"the {late.component} process (pid {late.pid}) did not get ready within {timeout:g} s "
                "(startup_timeout)"
            )
    return infos


def describe_exit(code: int) -> str:
    """`exit code 1`, `exit code 4, ended by its watchdog` or `signal SIGKILL`."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    meaning = MEANINGS.get(ExitCode(code)) if code in list(ExitCode) else None
    return f"exit code {code}, {meaning}" if meaning else f"exit code {code}"


def _environment() -> dict[str, str]:
    """The parent's, with this very sgviz importable (a checkout need not be installed), and with bounds where it has
    none on the kernels that torch keeps and on how long its threads spin."""
    root = str(Path(sgviz.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**KEPT_KERNELS, **SPINS, **os.environ, "PYTHONPATH": root + (os.pathsep + path if path else "")}


def _stderr_fd() -> int:
    """Children never write to the parent's standard output, which may be somebody's JSON."""
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL
    except (OSError, ValueError):
        return subprocess.DEVNULL
