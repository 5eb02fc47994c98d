"""Executes a notebook with the interpreter that runs the tests, and asks its kernel for facts at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

KERNEL = "the-tests"
CELL_TIMEOUT_S = 240
MARK = "FACTS "


def execute(path: Path, facts: str, folder: Path) -> tuple[nbformat.NotebookNode, Any]:
    """Run all cells in a fresh kernel whose folder is `folder`.

    Args:
        facts: an expression over the notebook's variables, evaluated after the last cell; JSON must hold it.

    Returns:
        The executed notebook (without the added cell) and the value of `facts`.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    code = f"import json as _json\nprint({MARK!r} + _json.dumps({facts}))"
    notebook.cells.append(nbformat.v4.new_code_cell(code))
    client = NotebookClient(
        notebook,
        kernel_name=KERNEL,
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,  # else one print may become two outputs
    )
    client.create_kernel_manager().kernel_spec_manager = _kernel_specs(folder)
    client.execute(cwd=str(folder))
    last = notebook.cells.pop()
    said = "".join(output.get("text", "") for output in last.outputs)
    return notebook, json.loads(said.partition(MARK)[2])


def _kernel_specs(folder: Path) -> KernelSpecManager:
    """One kernel only: the running interpreter, wherever the machine's own kernels point."""
    spec = folder / "kernels" / KERNEL
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": KERNEL, "language": "python"})
    )
    return KernelSpecManager(kernel_dirs=[str(spec.parent)])
