"""Terminal tables carry the recording's numbers at any width."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from sgviz.recording import Recording
from sgviz.viz.terminal import iterations_table, journey_table, stages_table

sys.path.insert(0, str(Path(__file__).parents[1] / "recording"))
from synthetic import SyntheticRun


@pytest.fixture(scope="module")
def rec() -> Recording:
    return Recording(SyntheticRun(8, seed=2).events)


def text(table: Table, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_journey_names_all_types_and_facts(rec: Recording, width: int) -> None:
    steps = rec.journey("req-001")
    shown = text(journey_table(steps), width)
    for step in steps:
        assert step.type in shown and f"{step.t_ms:.2f}" in shown and str(step.pid) in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


def test_iterations_show_first_and_last_of_many(rec: Recording) -> None:
    table = rec.iterations
    shown = text(iterations_table(table, limit=6))
    assert f"{len(table) - 6} more" in shown
    rows = [line.split()[:3] for line in shown.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    expected = table.iloc[[0, 1, 2, -3, -2, -1]]
    assert rows == [[str(row.iteration), str(row.bid), row["mode"]] for _, row in expected.iterrows()]
    assert "more" not in text(iterations_table(table, limit=len(table)))
    assert text(iterations_table(table.iloc[:0]))


def test_stages_add_up_in_the_footer(rec: Recording) -> None:
    stages = rec.stages("req-002")
    shown = text(stages_table(stages))
    total = sum(stage.duration_ns for stage in stages) / 1e6
    assert f"{total:,.2f}" in shown and "100.0 %" in shown
    assert all(stage.name in shown for stage in stages)
    assert "end to end" in text(stages_table([]))
