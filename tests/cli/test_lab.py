"""`sgviz lab`: what it starts, what it refuses, and that JupyterLab really comes up and leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from demo_process import Started
from lab_process import Client, kernels, own_folders

from sgviz.__main__ import main
from sgviz.cli import lab

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
Executed = list[list[str]]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executed]:
    """The command lines with which JupyterLab would have run."""
    calls: Executed = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: calls.append([name, *sys.argv[1:]]))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    before = signal.getsignal(signal.SIGINT)
    yield calls
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


# ---------------------------------------------------------------- what it starts


def test_it_is_jupyterlab_on_the_notebooks(executed: Executed) -> None:
    main(["lab"])
    (command,) = executed
    assert command[0] == "jupyterlab"
    assert f"--ServerApp.root_dir={NOTEBOOKS}" in command and "--ServerApp.ip=127.0.0.1" in command
    assert "--no-browser" not in command and not [word for word in command if "ServerApp.port" in word]
    assert (NOTEBOOKS / lab.FIRST).is_file() and f"--LabApp.default_url=/lab/tree/{lab.FIRST}" in command


def test_a_port_that_is_named_is_that_port_or_none(executed: Executed) -> None:
    main(["lab", "--port", "0", "--no-browser"])
    (command,) = executed
    (port,) = (int(word.partition("=")[2]) for word in command if word.startswith("--ServerApp.port="))
    assert 0 < port < 65536 and "--ServerApp.port_retries=0" in command and "--no-browser" in command


def test_copies_are_made_once_and_what_is_there_is_kept(
    executed: Executed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, count = tmp_path / "my work", len(list(NOTEBOOKS.glob("*.ipynb")))
    main(["lab", "--dir", str(mine)])
    assert f"{count} notebooks copied" in capsys.readouterr().out
    assert {each.name: each.read_bytes() for each in mine.iterdir()} == {
        each.name: each.read_bytes() for each in NOTEBOOKS.glob("*.ipynb")
    }
    (mine / lab.FIRST).write_text("changed")
    (mine / "02_batches_and_kv.ipynb").unlink()
    main(["lab", "--dir", str(mine)])
    assert "1 notebooks copied" in capsys.readouterr().out
    assert (mine / lab.FIRST).read_text() == "changed" and (mine / "02_batches_and_kv.ipynb").is_file()
    assert all(f"--ServerApp.root_dir={mine}" in command for command in executed)


# ---------------------------------------------------------------- what it refuses


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["lab", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_port_in_use_is_told_before_anything_is_done(
    executed: Executed, taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--port", str(taken), "--dir", str(tmp_path / "mine"))
    assert str(taken) in line and "choose another port" in line
    assert executed == [] and not (tmp_path / "mine").exists()


def test_without_jupyterlab(
    executed: Executed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install jupyterlab" in refused(capsys) and executed == []


def test_a_package_without_its_checkout_has_no_notebooks(
    executed: Executed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "site-packages/sgviz/cli/lab.py"))
    line = refused(capsys)
    assert f"{tmp_path}/site-packages/notebooks" in line and "checkout" in line and executed == []


def test_a_folder_that_cannot_be_made(
    executed: Executed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capsys, "--dir", str(tmp_path / "file"))
    assert f"cannot copy the notebooks to '{tmp_path}/file'" in line and executed == []


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--port", "65536"], "between 0 and 65535"), (["--prt", "1"], "did you mean '--port'?")],
)
def test_wrong_words(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["lab", *words])
    assert exit_.value.code == 2 and part in capsys.readouterr().err


# ---------------------------------------------------------------- for real


@pytest.fixture(params=["a terminal", "no terminal"])
def started(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Started, Client]]:
    """`sgviz lab` with folders of its own for all that JupyterLab keeps."""
    own_folders(monkeypatch, tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("lab", "--no-browser", "--port", str(port), "--dir", str(tmp_path / "mine"))
    ours, theirs = os.openpty()
    terminal = request.param == "a terminal"
    process = Started(*words, folder=tmp_path, stdin=theirs if terminal else subprocess.DEVNULL)
    try:
        client = Client(port)
        client.wait_until_up(process)
        yield process, client
    finally:
        process.end()
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_answers_runs_a_kernel_of_this_python_and_ctrl_c_leaves_nothing(
    started: tuple[Started, Client], tmp_path: Path
) -> None:
    process, client = started
    assert "JupyterLab" in client.ask("/lab")
    listed = {each["name"] for each in client.ask("/api/contents")["content"]}
    assert listed == {each.name for each in NOTEBOOKS.glob("*.ipynb")}
    session = {"path": lab.FIRST, "name": lab.FIRST, "type": "notebook", "kernel": {"name": "python3"}}
    client.ask("/api/sessions", session)  # as JupyterLab opens a notebook
    (kernel,) = kernels(process)
    assert kernel.cmdline()[0] == sys.executable and kernel.cwd() == str(tmp_path / "mine")
    code, alive = process.interrupt()
    assert code == 0 and alive == [] and not psutil.pid_exists(kernel.pid), process.err.read_text()
    left = [each.name for each in (tmp_path / "RUNTIME_DIR").iterdir()]
    assert left == ["jupyter_cookie_secret"], process.err.read_text()
    with pytest.raises(urllib.error.URLError):
        client.ask("/api")


def test_help_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lab", "--help"])
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--port", "--no-browser", "--dir"))
