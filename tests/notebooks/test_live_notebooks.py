"""The notebooks on watching and stepping: executed, and what they say is what the recording says."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_runner import execute

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
LIVE_FACTS = """{
    "shown": [numbers.seq, numbers.free, numbers.evictable, numbers.running, numbers.waiting],
    "folded": [moment.count, moment.free, moment.evictable, len(moment.running), len(moment.waiting)],
    "journey": slowest == table.rid.iloc[0], "balanced": rec.audit().balanced, "updates": dashboard.updates,
    "running": load.running, "finished": load.counts.finished, "failed": load.counts.failed, "closed": close(),
    "idle workers": __import__("time").sleep(1.0),  # they end by themselves, right after
    "threads": [t.name for t in threading.enumerate() if t.name.startswith("sgviz")],
}""".replace("threading.", "__import__('threading').")
STEP_FACTS = """{
    "kinds": [where.kind for where in decisions], "first": first.kind, "cut": cut.kind,
    "limit": limits.pending.get("max_running_requests", limits.max_running_requests),
    "earlier": earlier.iteration < cut.iteration, "tokens": [len(a["output_ids"]) for a in answers.values()],
    "parked": engine.internal_state()["parked"], "running": load.running, "closed": close(),
    "idle workers": __import__("time").sleep(1.0),  # they end by themselves, right after
    "threads": [t.name for t in threading.enumerate() if t.name.startswith("sgviz")],
}"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_live_dashboard(tmp_path: Path) -> None:
    notebook, facts = execute(NOTEBOOKS / "05_live_dashboard.ipynb", LIVE_FACTS, tmp_path)
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    shown = [each for each in outputs if WIDGET in each.get("data", {})]
    assert len(shown) == 5 and all({"image/png", "text/html"} & set(each["data"]) for each in shown)
    assert facts["shown"] == facts["folded"] and facts["shown"][0] > 1000
    assert facts["running"] and facts["finished"] >= 80 and facts["failed"] == 0
    assert facts["journey"] and facts["balanced"] and facts["updates"] > 3 and facts["threads"] == []


def test_step_the_scheduler(tmp_path: Path) -> None:
    notebook, facts = execute(NOTEBOOKS / "06_step_the_scheduler.ipynb", STEP_FACTS, tmp_path)
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    assert sum(WIDGET in each.get("data", {}) for each in outputs) == 2
    assert set(facts["kinds"]) <= {"admit.ok", "admit.refused", "scan.stopped", "chunk.cut"}
    assert facts["first"] == "tokens.sampled" and facts["cut"] == "chunk.cut"
    assert facts["limit"] == 2 and facts["earlier"] and len(facts["tokens"]) == 6
    said = "".join(each.get("text", "") for each in outputs)
    assert "events balance" in said and not facts["parked"] and facts["running"] and facts["threads"] == []
