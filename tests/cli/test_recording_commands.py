"""explain, diff, export and report on a file: what they print, write and refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import SyntheticRun

from sgviz.__main__ import main
from sgviz.recording import Recording, load


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Recording(SyntheticRun(8, seed=1, total=320, gap_us=2_000).events).save(tmp_path / "run.sgv")
    return tmp_path / "run.sgv"


def test_explain_says_what_python_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(path), "req-003", "--figure", str(path.with_suffix(".png"))]) == 0
    assert main(["explain", str(path), "--figure", str(path.with_suffix(".png")), "req-003"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("req-003 took ") and "decode" in out and "observing cost" in out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main(["explain", str(path)]) == 0
    *listed, cost = capsys.readouterr().out.splitlines()
    assert len(listed) == 8 and cost.startswith("observing cost")
    assert main(["explain", str(path), "--at", "0"]) == 0
    assert "nobody waited" in capsys.readouterr().out


def test_explain_takes_the_end_of_a_rid_and_lists_several(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(path), "…q-003"]) == 0
    assert capsys.readouterr().out.startswith("req-003 took ")
    assert main(["explain", str(path), "req-"]) == 1
    assert "req-001, " in capsys.readouterr().err


def test_explain_of_one_request_needs_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "one.sgv"
    Recording(SyntheticRun(1, seed=1, total=320).events).save(target)
    assert main(["explain", str(target)]) == 0
    assert " took " in capsys.readouterr().out.splitlines()[0]


def test_explain_at_counts_from_the_first_arrival(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rec = load(path)
    start = rec.requests.arrival_ms.min()
    moments = [event.t for event in rec.stamped()]
    at = next(ms for t in moments if len(rec.why_not_running(ms := (t - rec.t0) / 1e6 + 1e-3)))
    assert main(["explain", str(path), "--at", str(at - start)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = rec.why_not_running(at)
    assert len(lines) == 2 * len(table)
    assert lines[0].split()[:2] == ["1.", table.rid[0]] and lines[0].endswith(f": {table.cause[0]}")
    assert lines[1].strip() == table.detail[0]


def test_parquet_without_its_package_leaves_no_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(path), "--to", "parquet"]) == 1
    assert 'pip install -e ".[export]"' in capsys.readouterr().err
    assert not (path.parent / "run-parquet").exists()


def test_diff_compares_two_files(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recording(SyntheticRun(8, seed=1, total=320, gap_us=2_000, decode_us=20_000).events).save(
        tmp_path / "b.sgv"
    )
    assert main(["diff", str(path), str(tmp_path / "b.sgv"), "--figure", str(tmp_path / "d.svg")]) == 0
    out = capsys.readouterr().out
    assert "8 requests in both" in out and "largest changes" in out
    assert "<svg" in (tmp_path / "d.svg").read_text()


@pytest.mark.parametrize(
    ("to", "made"), [("perfetto", "run.pftrace"), ("otel", "run.otlp.jsonl"), ("csv", "run-csv")]
)
def test_export_writes_beside_the_recording(
    to: str, made: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(path), "--to", to]) == 0
    assert (path.parent / made).exists() and made in capsys.readouterr().out


def test_report_writes_one_page(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path)]) == 0
    target, cost = capsys.readouterr().out.splitlines()
    assert target == str(path.with_suffix(".html")) and cost.startswith("observing cost")
    assert "observing cost" in path.with_suffix(".html").read_text()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "cut off in its header"), (b"garbage garbage", "not an sgviz recording"), (None, "cannot read")],
)
def test_files_that_are_none_give_one_sentence(
    content: bytes | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.sgv"
    if content is not None:
        bad.write_bytes(content)
    for command in (["explain", str(bad), "x"], ["report", str(bad)], ["diff", str(bad), str(bad)]):
        assert main(command) == 1
        err = capsys.readouterr().err
        assert sentence in err and len(err.strip().splitlines()) == 1


def test_a_cut_file_is_read_as_far_as_it_goes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["explain", str(path)]) == 0
    assert "no whole event" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sgviz", "explain", str(path)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("beyond", ["before", "behind", "nowhere"])
def test_explain_at_outside_the_recording_says_where_it_ends(
    path: Path, capsys: pytest.CaptureFixture[str], beyond: str
) -> None:
    rec = load(path)
    end = (rec.t_end - rec.t0) / 1e6 - float(rec.requests.arrival_ms.min())
    at = {"before": -1e9, "behind": end + 1.0, "nowhere": float("nan")}[beyond]
    assert main(["explain", str(path), f"--at={at}"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f" to {end:,.3f} ms" in err
    assert main(["explain", str(path), f"--at={end}"]) == 0
