"""The notebooks on batches, memory and waits: executed, and what they say is what the recording says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from notebook_runner import execute

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
MEMORY_FACTS = """{
    "tokens": int(rec.iterations.new_tokens.sum()), "members": int(rec.batches.extend_len.sum()),
    "differences": len(rec.check()), "balanced": rec.audit().balanced, "waiting": len(moment.waiting),
    "cached": int(rec.iterations.cached_tokens.sum()), "chunked": int((rec.events.kind == "chunk.cut").sum()),
}"""
WAIT_FACTS = """{
    "sum": sum(part.duration_ns for part in explanation.parts), "total": explanation.total_ns,
    "unexplained": explanation.unexplained_ns, "causes": why.cause.tolist(),
    "counts": decisions["count"].max().item(), "first": found.first is not None, "balanced": rec.audit().balanced,
    "common": len(found.requests), "reasons": decisions.reason.unique().tolist(),
}"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(name: str, facts: str, folder: Path) -> tuple[str, int, dict[str, Any]]:
    """What it printed, how many pictures it drew, and its numbers."""
    notebook, found = execute(NOTEBOOKS / name, facts, folder)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    return text, sum("image/png" in output.get("data", {}) for output in outputs), found


def test_batches_and_kv(tmp_path: Path) -> None:
    text, pictures, facts = run("02_batches_and_kv.ipynb", MEMORY_FACTS, tmp_path)
    assert pictures == 3 and facts["tokens"] == facts["members"] > 0
    assert facts["differences"] == 0 and facts["balanced"] and "total: True" in text
    assert facts["waiting"] > 3 and facts["cached"] > 0 and facts["chunked"] > 0


def test_why_did_it_wait(tmp_path: Path) -> None:
    text, pictures, facts = run("03_why_did_it_wait.ipynb", WAIT_FACTS, tmp_path)
    assert pictures == 3 and facts["balanced"] and facts["common"] == 40 and facts["first"]
    shown = re.search(r"sum of the parts (\d+) ns, end to end (\d+) ns", text)
    assert shown is not None and shown[1] == shown[2]
    assert facts["sum"] == facts["total"] == int(shown[1]) and facts["unexplained"] <= 0.01 * facts["total"]
    assert set(facts["causes"][1:]) <= {"head_of_line", "retraction"} and "kv" in facts["reasons"]
    assert "held by" in text and "first decision that differs" in text
