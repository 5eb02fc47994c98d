"""The benchmark of a pair against two ranks, as a user runs it, for two seconds of made-up conversation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/pd_against_dp.py"
TOKEN_BYTES = 32 * 2 * 8 * 128 * 2  # of llama-3-8b: layers, K and V, heads, their size, bf16
LIMIT_S = 240.0


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT
    )


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = bench("--generated", "--seconds", "2", "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.alone
def test_both_shapes_answer_the_same_requests(found: dict[str, Any]) -> None:
    (dp,), (pd,) = found["runs"]["dp 2"], found["runs"]["pd 1 + 1"]
    for name in ("completed", "total_input_tokens", "total_output_tokens"):
        assert dp[name] == pd[name] > 0
    assert f"{dp['completed']} requests over" in found["workload"]
    for row in (dp, pd):
        for measure in ("ttft", "itl", "e2e_latency"):
            low, high, most = (row[f"{which}_{measure}_ms"] for which in ("median", "p90", "p99"))
            assert 0 < low <= high <= most
        assert row["output_throughput"] == pytest.approx(row["total_output_tokens"] / row["duration"])


@pytest.mark.slow
@pytest.mark.alone
def test_devices_and_transfers_are_those_of_the_work(found: dict[str, Any]) -> None:
    (dp,), (pd,) = found["runs"]["dp 2"], found["runs"]["pd 1 + 1"]
    assert list(dp["devices"]) == ["rank 0", "rank 1"] and list(pd["devices"]) == ["prefill", "decode"]
    assert pd["devices"]["decode"]["prompt_tokens"] == 0
    assert 1 <= dp["imbalance"] <= 2
    moved = pd["transfer"]
    assert moved["requests"] == pd["completed"]
    assert moved["bytes"] == pd["total_input_tokens"] * TOKEN_BYTES
    assert 0 < moved["median_bytes_per_s"] < 300e9  # the link of the simulated device
    assert "between them: what was sent is what came" in pd["audit"] and "balance" in dp["audit"]


def test_a_trace_or_a_made_up_one(tmp_path: Path) -> None:
    for words in ((), ("--generated", str(tmp_path / "t.csv"))):
        done = bench(*words)
        assert done.returncode == 2 and "give a trace file or --generated" in done.stderr


def test_only_the_first_seconds_of_a_trace_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import argparse

    import pd_against_dp

    path = tmp_path / "t.csv"
    rows = [
        "arrived_at,num_prefill_tokens,num_decode_tokens",
        "5,100,10",
        "6.5,9000,20",
        "8,50,2000",
        "40,1,1",
    ]
    path.write_text("\n".join(rows))
    given = argparse.Namespace(trace=str(path), generated=False, seconds=10.0)
    work = pd_against_dp.workload_of(given)
    assert [each.at_s for each in work.requests] == [0.0, 1.5, 3.0]
    assert [each.prompt_tokens for each in work.requests] == [100, 7000, 50]  # cut to what the context holds
    assert [each.output_tokens for each in work.requests] == [10, 20, 1000]
    assert len(pd_against_dp.workload_of(argparse.Namespace(generated=True, seconds=60.0)).requests) == 191
