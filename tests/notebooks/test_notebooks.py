"""The notebooks run in a fresh kernel, and what they say is so; the committed ones show what they should."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_runner import execute

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ONE_REQUEST = ROOT / "notebooks/01_one_request.ipynb"
MAX_BYTES = 600_000
TYPES = [
    "ChatCompletionRequest",
    "GenerateReqInput",
    "TokenizedGenerateReqInput",
    "Req",
    "ScheduleBatch",
    "GenerationBatchResult",
    "BatchTokenIDOutput",
    "BatchStrOutput",
    "SSE chunk",
]
FACTS = """{
    "reply": reply,
    "second reply": text_of(second_lines),
    "types": [step.type for step in steps],
    "t_ms": [step.t_ms for step in steps],
    "live": type(obj).__name__,
    "stages_ns": [stage.duration_ns for stage in stages],
    "end_to_end_ns": end_to_end_ns,
    "modes": iterations["mode"].tolist(),
    "new_tokens": iterations.new_tokens.tolist(),
    "kv_used": iterations.kv_used.tolist(),
    "prompt": tokenized.input_ids,
    "output": req.output_ids,
    "cached": [both.request(each).cached_tokens for each in both.rids],
    "prompts": [both.request(each).prompt_tokens for each in both.rids],
    "second extend": both.iterations.query("mode == 'extend'").new_tokens.tolist()[1],
    "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("sgviz")),
}"""


@dataclass
class Executed:
    notebook: nbformat.NotebookNode
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def one_request(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    notebook, facts = execute(ONE_REQUEST, FACTS, tmp_path_factory.mktemp("notebook"))
    return Executed(notebook, facts)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    return [
        base64.b64decode(output.data["image/png"])
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def said(notebook: nbformat.NotebookNode) -> str:
    """All plain text that the cells gave."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "\n".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs
    )


# ---------------------------------------------------------------- as committed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_are_executed_in_order_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < MAX_BYTES
    assert notebook.metadata.kernelspec.name == "python3"


def test_the_first_notebook_explains_each_type_in_the_order_of_the_request() -> None:
    notebook = nbformat.read(ONE_REQUEST, as_version=4)
    pattern = r"^## (\d)\. (.+)$"
    pages = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    headings = [heading for page in pages for heading in re.findall(pattern, page, re.MULTILINE)]
    assert headings == [(str(number), name) for number, name in enumerate(TYPES, start=1)]


# ---------------------------------------------------------------- as executed now


@pytest.mark.slow
def test_no_cell_fails_and_the_same_cells_speak(one_request: Executed) -> None:
    """What the committed notebook shows in kind (text, table, picture), it shows now."""
    committed = nbformat.read(ONE_REQUEST, as_version=4)
    assert kinds(one_request.notebook) == kinds(committed)


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What each cell gives, whatever it says."""
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {"stream": ""})})
        for cell in code_cells(notebook)
    ]


@pytest.mark.slow
def test_the_nine_types_are_seen_in_order(one_request: Executed) -> None:
    facts = one_request.facts
    assert facts["types"] == TYPES and facts["live"] == "GenerateReqInput"
    assert facts["t_ms"][0] == 0 and facts["t_ms"] == sorted(facts["t_ms"])
    text = said(one_request.notebook)
    places = [text.rindex(f"m{name}") if f"m{name}" in text else text.rindex(name) for name in TYPES]
    assert places == sorted(places)


@pytest.mark.slow
def test_the_sums_are_equal(one_request: Executed) -> None:
    facts = one_request.facts
    assert sum(facts["stages_ns"]) == facts["end_to_end_ns"] > 0
    shown = re.search(r"sum of the stages ([\d.]+) ms, end to end ([\d.]+) ms", said(one_request.notebook))
    assert shown is not None and shown[1] == shown[2] == f"{facts['end_to_end_ns'] / 1e6:.6f}"


@pytest.mark.slow
def test_the_iterations_fit_the_tokens(one_request: Executed) -> None:
    facts = one_request.facts
    assert facts["modes"] == ["extend"] + ["decode"] * (len(facts["output"]) - 1)
    assert facts["new_tokens"] == [len(facts["prompt"])] + [1] * (len(facts["output"]) - 1)
    assert facts["kv_used"] == [len(facts["prompt"]) + step for step in range(len(facts["output"]))]


@pytest.mark.slow
def test_the_answers_and_the_prefix_that_was_found(one_request: Executed) -> None:
    facts = one_request.facts
    assert "Paris" in facts["reply"] and "Rome" in facts["second reply"]
    assert facts["cached"][0] == 0 < facts["cached"][1] < facts["prompts"][1]
    assert facts["second extend"] == facts["prompts"][1] - facts["cached"][1]


@pytest.mark.slow
def test_the_figures_are_pictures(one_request: Executed) -> None:
    found = pictures(one_request.notebook)
    assert len(found) == 2
    assert all(picture.startswith(b"\x89PNG") and 5_000 < len(picture) < 150_000 for picture in found)


@pytest.mark.slow
def test_nothing_is_left(one_request: Executed) -> None:
    assert one_request.facts["threads"] == []
    assert "nobody listens any more" in said(one_request.notebook)
