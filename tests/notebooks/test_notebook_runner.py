"""The runner sees what a notebook leaves behind: children, processes that outlive the kernel, socket folders."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
from notebook_runner import OWNER, LeftBehind, execute

pytestmark = pytest.mark.slow
CLEAN = "answer = 6 * 7"
CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""
# as a child of an init process, in a session of its own
ORPHAN = """
import subprocess, sys
code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
"""
ENGINE = """
from sgviz import Engine
engine = Engine("tiny-llama", mode="processes", device="mock")
reply = engine.chat("Hello", max_tokens=3)
"""


def written(folder: Path, *cells: str) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = folder / "made.ipynb"
    nbformat.write(notebook, path)
    return path


def running_in(folder: Path) -> list[psutil.Process]:
    """Processes of any execution in that folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(OWNER, "").startswith(f"{folder}#"):
                found.append(process)
    return found


def test_a_clean_notebook_gives_its_facts(tmp_path: Path) -> None:
    notebook, facts = execute(written(tmp_path, CLEAN), "answer", tmp_path)
    assert facts == 42 and len(notebook.cells) == 1


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        (CHILD, "children after the last cell: .'python"),
        (ORPHAN, "processes after the kernel: .'python"),
        (ENGINE, "children after the last cell: .*sgviz"),
        ("from pathlib import Path\nimport tempfile\ntempfile.mkdtemp(prefix='sgviz-')", "socket folders"),
    ],
    ids=["child", "orphan", "engine", "folder"],
)
def test_what_is_left_is_seen_and_ended(cell: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(LeftBehind, match=what):
        execute(written(tmp_path, cell), "1", tmp_path)
    assert running_in(tmp_path) == []
