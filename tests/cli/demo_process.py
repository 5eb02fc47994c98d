"""`sgviz demo` and other commands as processes of their own, with a temporary folder that shows what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PATIENCE_S = 90.0


def run(*arguments: str, folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `sgviz ARGUMENTS` to its end with `folder` as its folder for temporary files."""
    return subprocess.run(
        [sys.executable, "-m", "sgviz", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=PATIENCE_S * 2,
    )


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def socket_folders(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("sgviz-*")]


def _hear_ctrl_c() -> None:
    """As from a terminal: what a shell starts in the background would inherit a SIGINT that is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Started:
    """A command that runs in a process group of its own, as a terminal starts it."""

    def __init__(self, *arguments: str, folder: Path, stdin: int | None = None) -> None:
        self.folder = folder
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sgviz", *arguments],
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environment(folder),
                start_new_session=True,
                preexec_fn=_hear_ctrl_c,
            )

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_children(self, count: int) -> None:
        self._until(lambda: len(self.children()) >= count)

    def wait_for_work(self, seconds: float) -> None:
        """Until it has used so much CPU time, which says how far it is on a busy machine too."""
        process = psutil.Process(self.process.pid)
        self._until(lambda: process.cpu_times().user >= seconds)

    def wait_for_output(self, text: str, more: int = 0) -> None:
        """Until standard output holds `text` and `more` characters after it."""
        self._until(lambda: len(self.out.read_text().partition(text)[2]) > more)

    def interrupt(self) -> tuple[int, list[psutil.Process]]:
        """What Ctrl-C does: SIGINT to the whole group. Returns the exit code and the children still alive."""
        children = self.children()
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(children, timeout=5)
        return code, alive

    def end(self) -> None:
        """Whatever happened, nothing of it runs on."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _until(self, condition: object) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():  # type: ignore[operator]
            assert self.process.poll() is None, f"exit {self.process.returncode}\n{self.err.read_text()}"
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.02)
