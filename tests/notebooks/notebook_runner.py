"""Executes a notebook with the interpreter that runs the tests, and asks its kernel for facts at the end."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

KERNEL = "the-tests"
CELL_TIMEOUT_S = 240
MARK = "FACTS "
PATIENCE_S = 10
OWNER = "SGVIZ_TEST_NOTEBOOK"  # environment variable that every process of one execution inherits
CHILDREN = "[each.name() for each in __import__('psutil').Process().children(recursive=True)]"


class LeftBehind(AssertionError):
    """A notebook's last cell has run, and something of its engines is still there."""


def execute(path: Path, facts: str, folder: Path) -> tuple[nbformat.NotebookNode, Any]:
    """Run all cells in a fresh kernel whose folder is `folder`.

    Args:
        facts: an expression over the notebook's variables, evaluated after the last cell; JSON must hold it.

    Returns:
        The executed notebook (without the added cell) and the value of `facts`.

    Raises:
        CellExecutionError: a cell raised.
        LeftBehind: the kernel has children after the last cell, a process outlives it, or a socket folder is left.
    """
    notebook = nbformat.read(path, as_version=4)
    code = f"import json as _json\nprint({MARK!r} + _json.dumps([{facts}, {CHILDREN}]))"
    notebook.cells.append(nbformat.v4.new_code_cell(code))
    client = NotebookClient(
        notebook,
        kernel_name=KERNEL,
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,  # else one print may become two outputs
    )
    client.create_kernel_manager().kernel_spec_manager = _kernel_specs(folder)
    owner, sockets = f"{folder}#{uuid.uuid4().hex}", folder / "t"
    sockets.mkdir()
    try:
        client.execute(cwd=str(folder), env={**os.environ, OWNER: owner, "TMPDIR": str(sockets)})
    finally:
        strays = _end_strays(owner)
    last = notebook.cells.pop()
    said = "".join(output.get("text", "") for output in last.outputs)
    found, children = json.loads(said.partition(MARK)[2])
    if children or strays:
        raise LeftBehind(f"children after the last cell: {children}; processes after the kernel: {strays}")
    if left := [each.name for each in sockets.glob("sgviz-*")]:
        raise LeftBehind(f"socket folders after the kernel: {left}")
    return notebook, found


def owned_by(owner: str) -> list[psutil.Process]:
    """The processes of that execution that run; one that has ended and waits for its parent's look does not."""
    return [process for process in psutil.process_iter() if _owner(process) == owner]


def _end_strays(owner: str) -> list[str]:
    """Names of the processes of that execution which do not end by themselves within seconds; they are ended."""
    deadline = time.monotonic() + PATIENCE_S
    while (alive := owned_by(owner)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [process.name() for process in alive]
    for process in alive:
        process.kill()
    while owned_by(owner):
        time.sleep(0.02)
    return names


def _owner(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(OWNER)
    except (psutil.Error, OSError):  # somebody else's, or it has ended
        return None


def _kernel_specs(folder: Path) -> KernelSpecManager:
    """One kernel only: the running interpreter, wherever the machine's own kernels point."""
    spec = folder / "kernels" / KERNEL
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": KERNEL, "language": "python"})
    )
    return KernelSpecManager(kernel_dirs=[str(spec.parent)])
