"""Commands that read a recording never write over it, and say what they cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgviz.errors import BadRequest, SgvizError
from sgviz.recording import FileSink, Recording, load
from sgviz.workload import trace


@pytest.fixture
def run(tmp_path: Path) -> Path:
    FileSink(tmp_path / "run.sgv").close()
    return tmp_path / "run.sgv"


def sgviz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgviz", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", [("report",), ("export", "--to", "perfetto")])
def test_the_recording_itself_is_no_target(run: Path, command: tuple[str, ...]) -> None:
    before = run.read_bytes()
    done = sgviz(*command, str(run), "-o", str(run))
    assert (
        done.returncode != 0 and "is the recording itself" in done.stderr and "Traceback" not in done.stderr
    )
    assert run.read_bytes() == before


def test_a_recording_is_saved_behind_a_link_and_over_no_device(run: Path, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.sgv", tmp_path / "link.sgv", tmp_path / "pipe"
    target.write_bytes(b"old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    rec = load(run)
    rec.save(link)
    assert link.is_symlink() and target.read_bytes() == run.read_bytes()
    with pytest.raises(SgvizError, match="no file"):
        rec.save(pipe)
    assert pipe.is_fifo()


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
def test_a_moment_is_a_number(run: Path, time: float) -> None:
    rec: Recording = load(run)
    with pytest.raises(BadRequest, match="time must be a number"):
        rec.at(time=time)
    done = sgviz("explain", str(run), "--at", str(time))
    assert done.returncode != 0 and "Traceback" not in done.stderr


def test_a_trace_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "bin.csv").write_bytes(b"\x89\xff\x00")
    with pytest.raises(BadRequest, match="is no trace"):
        trace(tmp_path / "bin.csv")


def test_doctor_wants_a_port() -> None:
    done = sgviz("doctor", "--port", "99999")
    assert done.returncode == 2 and "99999" in done.stderr
