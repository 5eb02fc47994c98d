"""`sgviz serve` as a real process of its own, for tests that talk to it, signal it or kill its children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

START_S = 90.0


class ServerProcess:
    """Starts the server and waits for the ready line; always ends it and its children."""

    READY = r"ready: (https?://\S+)/v1"

    def __init__(
        self,
        *flags: str,
        model: str = "tiny-llama",
        wait: bool = True,
        folder: str | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`folder`: where its sockets go, if not into a place of its own. `prefix`: what runs the command."""
        self.folder = tempfile.TemporaryDirectory(prefix="test-serve-")
        self.sockets = folder or self.folder.name
        self.log = Path(self.folder.name, "log")
        command = [
            *prefix,
            sys.executable,
            "-m",
            "sgviz",
            "serve",
            "--model-path",
            model,
            "--port",
            "0",
            *flags,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": self.sockets, "OMP_NUM_THREADS": "1"},
            )
        self.url = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            found = re.search(self.READY, self.text())
            if found:
                self.url = found.group(1)
                return
            assert self.process.poll() is None, f"exit {self.process.returncode}\n{self.text()}"
            assert time.monotonic() < deadline, f"not ready\n{self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def children(self) -> dict[str, psutil.Process]:
        """The component processes by component name."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        named = {" ".join(child.cmdline()): child for child in found}
        return {title.removeprefix("sgviz::").strip(): child for title, child in named.items()}

    def wait_for_children(self, count: int) -> list[psutil.Process]:
        """Until it has started so many processes, whether they are ready or not."""
        deadline = time.monotonic() + START_S
        while len(found := psutil.Process(self.process.pid).children(recursive=True)) < count:
            assert self.process.poll() is None, f"exit {self.process.returncode}\n{self.text()}"
            assert time.monotonic() < deadline, f"only {found}\n{self.text()}"
            time.sleep(0.02)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 15.0) -> int:
        return self.process.wait(timeout)

    def leftovers(self) -> list[str]:
        """Socket folders that are still there."""
        return [str(path) for path in Path(self.sockets).glob("sgviz-*")]

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = (
            []
            if self.process.poll() is not None
            else psutil.Process(self.process.pid).children(recursive=True)
        )
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        psutil.wait_procs(children, timeout=5)
        for child in children:
            if child.is_running():
                child.kill()
        if error is not None:
            print(self.text())
        self.folder.cleanup()


def gone(processes: list[psutil.Process], timeout: float = 5.0) -> bool:
    """Whether all these processes end within the time."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return not alive


class Background(threading.Thread):
    """Runs a call and keeps its result or exception."""

    def __init__(self, call: object) -> None:
        super().__init__(daemon=True)
        self.call, self.result, self.error = call, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()  # type: ignore[operator]
        except Exception as error:
            self.error = error
