"""Profiler: torch's profiler over the scheduler's process, all threads of it; a Chrome trace when it ends.

Mirrors SGLang's profiler mixin of the scheduler. Simplified: no stages, no memory snapshots. Every forward
is a span of the scheduler's thread, named by its batch, so that a trace shows something on a device without torch too.
torch can watch one profile a process, and ends the process where there are two: the claim below keeps them apart.
Imports: batch, errors, worker.protocol, torch.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.errors import BadRequest
from sgviz.worker.protocol import Launch

DIR_VARIABLE = "SGVIZ_TORCH_PROFILER_DIR"
ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
NAME_CHARS = "-_."  # beside letters and digits


class ProfilerClaim:
    """Who has torch's profiler, if anybody; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Path | None = None

    def take(self, path: Path) -> None:
        """It is for the profile into `path`. Raises BadRequest if another has it."""
        with self._lock:
            if self._holder is not None:
                raise BadRequest(
                    f"a profile of this process is under way already, into {self._holder}, of another engine in it; "
                    "torch makes one at a time"
                )
            self._holder = path

    def give_back(self) -> None:
        with self._lock:
            self._holder = None


# torch's profiler belongs to the process, so the claim on it does too; torch cannot be asked who has it
profiler_claim = ProfilerClaim()


class Profiler:
    """One profile, from `start` to `stop`.

    Args:
        output_dir: made if it is not there; None: $SGVIZ_TORCH_PROFILER_DIR, else the system's folder for such files.
        num_steps: forwards after which it ends by itself; None: it does not.
        activities: CPU, GPU; None: all there are.
        profile_id: beginning of the file's name; None: the time.
        rank: data parallel rank, which is in the file's name then.

    Raises:
        BadRequest: the folder cannot be written, or the activity cannot be had here.
    """

    def __init__(
        self,
        *,
        output_dir: str | None,
        num_steps: int | None,
        activities: Sequence[str] | None,
        with_stack: bool,
        record_shapes: bool,
        profile_id: str | None,
        rank: int | None = None,
    ) -> None:
        kinds = activities or (("CPU", "GPU") if torch.cuda.is_available() else ("CPU",))
        if "GPU" in kinds and not torch.cuda.is_available():
            raise BadRequest("activities: GPU needs a GPU, and torch finds none here", param="activities")
        suffix = "" if rank is None else f"-DP-{rank}"
        self.path = _writable(output_dir) / f"{_name(profile_id)}-TP-0{suffix}.trace.json.gz"
        self._left = num_steps
        self._newest: Launch | None = None
        self._profile = profile(
            activities=[ACTIVITIES[kind] for kind in kinds],
            with_stack=with_stack,
            record_shapes=record_shapes,
            # the forwards run in threads of their own
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )

    @property
    def is_done(self) -> bool:
        """The forwards it was to see are over."""
        return self._left == 0 and self._newest is not None and self._newest.done()

    def start(self) -> None:
        """Begin. Raises BadRequest if another profile of this process is under way, RuntimeError if torch cannot."""
        profiler_claim.take(self.path)
        try:
            self._profile.start()
        except BaseException:
            profiler_claim.give_back()
            raise

    def around(self, batch: ScheduleBatch, launch: Callable[[], Launch]) -> Launch:
        """Make a span of the launch of `batch`, and count it."""
        with record_function(f"launch #{batch.bid} {batch.forward_mode.value}[{len(batch.reqs)}]"):
            launched = launch()
        if self._left:
            self._left, self._newest = self._left - 1, launched
        return launched

    def stop(self) -> None:
        """End it and write the file, whole or not at all. Raises OSError if it cannot be written."""
        try:
            self._profile.stop()
        finally:
            profiler_claim.give_back()
        part = self.path.with_name(f".{self.path.name}")  # the suffix says that it is packed
        self._profile.export_chrome_trace(str(part))
        os.replace(part, self.path)


def _name(profile_id: str | None) -> str:
    name = profile_id if profile_id is not None else f"{time.time():.6f}"
    if (
        not name
        or name.startswith(".")
        or not all(c.isascii() and (c.isalnum() or c in NAME_CHARS) for c in name)
    ):
        raise BadRequest(
            f"profile_id must be made of letters, digits, - _ and . (not first), got {name!r}",
            param="profile_id",
        )
    return name


def _writable(output_dir: str | None) -> Path:
    """The folder, made if need be, in which a file can be made."""
    folder = Path(output_dir or os.environ.get(DIR_VARIABLE) or tempfile.gettempdir()).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:  # ValueError: of a NUL in it
        raise BadRequest(
            f"output_dir {str(folder)!r} cannot be written: {error}", param="output_dir"
        ) from None
