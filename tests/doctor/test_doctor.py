"""The doctor measures: made-up machines, ports and folders give the findings they should."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sgviz.channel import SHORT_FOLDER
from sgviz.doctor import (
    Check,
    DoctorReport,
    State,
    gpu,
    machine,
    models,
    network,
    render,
    report,
    software,
    to_json,
)


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def temp_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of our own with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="d") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


# ---------------------------------------------------------------- software


def test_missing_packages_are_findings_and_not_exceptions() -> None:
    found = by_name(software.checks(lambda _: None))
    assert found["tokenizers"].state is State.BAD
    assert "pip install" in found["tokenizers"].advice
    assert found["sgviz"].state is State.WARN
    assert all(check.state is not State.OK for name, check in found.items() if name != "Python")


def test_a_required_package_that_is_not_shown_is_missed_too() -> None:
    if not software.requirements():
        pytest.skip("sgviz is imported from a folder, so its requirements are not known")
    found = by_name(software.checks(lambda name: None if name == "safetensors" else "1.0"))
    assert found["requirements"].found == "missing: safetensors"
    assert found["requirements"].state is State.BAD


def test_versions_are_the_installed_ones() -> None:
    assert by_name(software.checks())["msgspec"].found == msgspec.__version__


# ---------------------------------------------------------------- torch and GPU


def test_a_missing_torch_is_one_bad_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = by_name(gpu.checks(lambda _: None))
    assert found["torch"].state is State.BAD
    assert "torch threads" not in found
    assert (found["triton"].found, found["triton"].state) == ("not installed (optional)", State.NONE)


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an `nvidia-smi` of our own first on the path."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_gpu_that_only_the_driver_sees_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, monkeypatch, "echo 'H200, 143771 MiB, 550.54'")
    monkeypatch.setitem(sys.modules, "torch", None)
    check = by_name(gpu.checks())["GPU"]
    assert check.state is State.WARN
    assert "H200, 143771 MiB, 550.54" in check.found
    assert check.advice


def test_a_driver_tool_that_fails_tells_of_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, "echo 'cannot talk to the driver'; exit 9")
    assert gpu.probe_driver() == []


def test_torch_facts_are_torch_s_own() -> None:
    import torch

    facts = gpu.probe_torch()
    assert isinstance(facts, gpu.TorchFacts)
    assert facts.version == torch.__version__
    assert facts.threads == torch.get_num_threads()
    assert len(facts.gpus) == torch.cuda.device_count()


# ---------------------------------------------------------------- machine


def fake_machine(
    root: Path, *, flags: str = "fpu sse2 avx avx2", quota: str = "max 100000", limit: str = "max"
) -> Path:
    """A `proc` and `sys` of 8 GiB, of which 6 are free, and a control group that uses 1."""
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Frob 3000\nflags\t\t: {flags}\n")
    (root / "proc/meminfo").write_text(f"MemTotal:  {8 * 2**20} kB\nMemAvailable:  {6 * 2**20} kB\n")
    (group / "cpu.max").write_text(quota + "\n")
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text(f"{2**30}\n")
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    found = by_name(machine.checks(fake_machine(tmp_path)))
    assert found["CPU"].found == "Frob 3000"
    assert found["vector units"].found == "avx avx2"
    assert found["memory"] == Check(topic="machine", name="memory", found="6,144 MiB free of 8,192 MiB")
    assert "limited" not in found["cores"].found


def test_what_a_control_group_takes_away_is_not_counted(tmp_path: Path) -> None:
    found = by_name(machine.checks(fake_machine(tmp_path, quota="150000 100000", limit=str(2 * 2**30))))
    assert found["cores"].found.endswith("limited to 1.5 cores of time")
    assert found["cores"].state is State.WARN
    assert found["memory"].found == "1,024 MiB free of 2,048 MiB"
    assert found["memory"].state is State.WARN


def test_a_pc_without_avx2_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert (
        by_name(machine.checks(fake_machine(tmp_path, flags="sse2 avx")))["vector units"].state is State.WARN
    )


def test_where_the_kernel_tells_nothing_it_is_said_to_be_unknown(tmp_path: Path) -> None:
    found = by_name(machine.checks(tmp_path))
    assert found["memory"].found == found["vector units"].found == "unknown"


# ---------------------------------------------------------------- models


def test_models_in_the_cache_are_listed_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGVIZ_CACHE", str(tmp_path / "cache"))
    empty = by_name(models.checks())
    assert empty[models.DEFAULT_MODEL].state is State.WARN
    assert empty["cache"].found.startswith(f"{tmp_path / 'cache'}, ")
    for name, size in ((models.DEFAULT_MODEL, 3), ("other", 5), (".other.part-x", 7)):
        folder = tmp_path / "cache/models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(size * 2**20))
    full = by_name(models.checks())
    assert full[models.DEFAULT_MODEL] == Check(topic="models", name=models.DEFAULT_MODEL, found="3 MiB")
    assert full["other"].found == "5 MiB"
    assert ".other.part-x" not in full


# ---------------------------------------------------------------- network


def test_a_taken_port_names_who_has_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        check = by_name(network.checks(port))[f"port {port}"]
        assert check.state is State.WARN
        assert f"(pid {os.getpid()})" in check.found
        assert "--port" in check.advice
    assert by_name(network.checks(port))[f"port {port}"].found == "free on 127.0.0.1"
    assert network.port_owner(port) is None


def test_sockets_can_be_made_and_leave_nothing(temp_folder: Path) -> None:
    assert by_name(network.checks(0))["sockets"].state is State.OK
    assert list(temp_folder.iterdir()) == []


def test_a_temporary_folder_with_too_long_a_name_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    check = by_name(network.checks(0))["sockets"]
    assert check.state is State.OK
    assert check.found == f"can be made in {SHORT_FOLDER}"
    assert list(long.iterdir()) == []


def test_a_temporary_folder_that_is_gone_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    check = by_name(network.checks(0))["sockets"]
    assert check.state is State.BAD
    assert "TMPDIR" in check.advice


def test_left_over_folders_are_those_in_which_nobody_listens(temp_folder: Path) -> None:
    names = ("dead", "alive", "foreign", "empty")
    dead, alive, foreign, _ = (temp_folder / f"sgviz-{name}" for name in names)
    for name in names:
        (temp_folder / f"sgviz-{name}").mkdir()
    (foreign / "notes.txt").write_text("mine")
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(str(dead / "0123456789ab-events"))
        second.bind(str(alive / "0123456789ab-events"))
        second.listen()
        first.close()
        assert network.stale_folders(temp_folder) == [dead]
        check = by_name(network.checks(0))["left-over sockets"]
    assert check.state is State.WARN
    assert str(dead) in check.advice


# ---------------------------------------------------------------- report


def example(*states: State) -> DoctorReport:
    return DoctorReport(
        checks=tuple(
            Check(topic="t", name=f"n{i}", found=f"[cpu] {i}", state=state, advice="Do [this]." if i else "")
            for i, state in enumerate(states)
        )
    )


@pytest.mark.parametrize(
    ("states", "worst", "code"),
    [
        ((), State.OK, 0),
        ((State.OK, State.WARN), State.WARN, 0),
        ((State.BAD, State.WARN, State.OK), State.BAD, 1),
    ],
)
def test_the_worst_finding_decides(states: tuple[State, ...], worst: State, code: int) -> None:
    assert (example(*states).state, example(*states).exit_code) == (worst, code)


def test_json_holds_the_whole_report() -> None:
    given = example(State.OK, State.BAD)
    assert msgspec.json.decode(to_json(given), type=DoctorReport) == given
    assert msgspec.json.decode(to_json(given))["state"] == "bad"


def test_the_table_shows_every_finding_and_all_advice_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    render(example(State.OK, State.WARN), Console(width=100, color_system=None))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ok", "n0", "[cpu]", "0"] in lines
    assert ["warn", "n1", "[cpu]", "1"] in lines
    assert ["->", "Do", "[this]."] in lines


def test_this_machine_is_reported_on() -> None:
    found = report(settings_port=0)
    assert {check.topic for check in found.checks} == {
        "software",
        "torch and GPU",
        "machine",
        "models",
        "network",
    }
    assert all(bool(check.advice) == (check.state in (State.WARN, State.BAD)) for check in found.checks)


def test_a_fault_of_a_probe_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Check]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(models, "checks", broken)
    found = by_name(report(settings_port=0).checks)
    assert "RuntimeError: no such luck" in found["models"].found
    assert "sockets" in found
