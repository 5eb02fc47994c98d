"""The notebook on both loops: executed, its sentences are its numbers, and the loops give the same answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from notebook_runner import execute

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks/04_overlap_vs_normal.ipynb"
FACTS = """{
    "same": bool(pairs.same_output.all()),
    "wall": wall.overlap_account[["hidden_share", "device_idle_share"]].T.to_dict(),
    "virtual": virtual.overlap_account[["hidden_share", "device_idle_share"]].T.to_dict(),
    "dropped": float(wall.table.dropped_events.sum()),
    "ratios": wall.ratios().loc["overlap"].to_dict(),
    "gains": sweep["gain in throughput"].to_dict(),
    "cpu": {str(threads): found.ratios().loc["overlap"].to_dict() for threads, found in cpu.items()},
    "cpu same": all(bool(found.requests.same_output.all()) for found in cpu.values()),
}"""
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], dict[str, Any]]:
    """What it printed, the kinds of its outputs, and its numbers."""
    notebook, facts = execute(NOTEBOOK, FACTS, tmp_path_factory.mktemp("notebook"))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    return text, [kind for output in outputs for kind in output.get("data", {})], facts


def test_both_loops_give_the_same_answers(executed: tuple[str, list[str], dict[str, Any]]) -> None:
    text, _, facts = executed
    assert facts["same"] and facts["cpu same"] and facts["dropped"] == 0
    assert "192 of 192 requests have the same tokens" in text and "Answers changed by it: 0." in text


def test_the_overlap_loop_hides_and_the_normal_loop_does_not(
    executed: tuple[str, list[str], dict[str, Any]],
) -> None:
    facts = executed[2]
    for clock in ("wall", "virtual"):
        normal, overlap = facts[clock]["normal"], facts[clock]["overlap"]
        assert overlap["hidden_share"] > normal["hidden_share"]
    # virtual time hardly depends on how busy the machine is
    normal, overlap = facts["virtual"]["normal"], facts["virtual"]["overlap"]
    assert overlap["hidden_share"] > 0.8 and overlap["device_idle_share"] < 0.05
    assert overlap["device_idle_share"] < normal["device_idle_share"]
    gains = list(facts["gains"].values())
    assert len(gains) == 5 and max(gains) > min(gains) > -0.05


def test_the_sentences_are_the_numbers(executed: tuple[str, list[str], dict[str, Any]]) -> None:
    text, kinds, facts = executed
    said = re.search(r"the overlap loop gives ([\d.]+) times the throughput \(([\d.]+) to ([\d.]+)\)", text)
    assert said is not None
    assert [float(part) for part in said.groups()] == pytest.approx(
        [facts["ratios"][name] for name in ("median", "low", "high")], abs=0.006
    )
    for threads, ratio in facts["cpu"].items():
        found = re.search(rf"This CPU, torch threads {threads}: .*? is ([\d.]+) times .*", text)
        assert found is not None and float(found[1]) == pytest.approx(ratio["median"], abs=0.006)
        assert ("noise" in found[0]) == (ratio["low"] < 1 < ratio["high"])
    assert kinds.count("image/png") == 2 and "SIMULATED" in text
