"""JupyterLab in a headless Chromium, used as a person does: menus, buttons and typing, nothing of its own code.

A notebook's cells are run from the menu; what one wants to know of the kernel is asked in a cell at the end.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from demo_process import PATIENCE_S, Started
from lab_process import TOKEN, Client, own_folders

RUN_MS = 240_000  # for all cells of a notebook
WINDOW = {"width": 1500, "height": 1700}  # the highest widget fits, so pictures of it are whole
PROMPTS = (
    "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map((e) => e.textContent)"
)
LAST_PROMPT = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].at(-1).textContent"
ERRORS = """() => [...document.querySelectorAll(`.jp-Notebook [data-mime-type='application/vnd.jupyter.error'],
  .jp-Notebook [data-mime-type='application/vnd.jupyter.stderr']`)].map((each) => each.textContent)"""


class Lab:
    """A running `sgviz lab`: its process, its HTTP interface, where its notebooks lie."""

    def __init__(self, process: Started, port: int, folder: Path) -> None:
        self.process, self.port, self.folder = process, port, folder
        self.client = Client(port)

    def kernel(self) -> dict[str, Any] | None:
        """The only kernel as the server tells it; None while there is none, or it is just being started."""
        try:
            found = self.client.ask("/api/kernels")
        except urllib.error.HTTPError:  # it answers 500 while it starts one
            return None
        return found[0] if found else None

    def ports(self) -> set[int]:
        """Where this process and its children listen, apart from JupyterLab's own port."""
        family = [psutil.Process(self.process.process.pid), *self.process.children()]
        links = [link for each in family for link in each.net_connections("inet")]
        return {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN} - {self.port}


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """`sgviz lab` with a clean profile under `folder`; whatever happens, nothing of it runs on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as environment:
        own_folders(environment, folder)
        words = ("lab", "--no-browser", "--port", str(port), "--dir", str(folder / "mine"))
        process = Started(*words, folder=folder, stdin=subprocess.DEVNULL)
    try:
        lab = Lab(process, port, folder / "mine")
        lab.client.wait_until_up(process)
        yield lab
    finally:
        process.end()


class LabPage:
    """One notebook, opened. `faults`: errors that no code of the page caught."""

    def __init__(self, browser: Any, lab: Lab, notebook: str) -> None:
        self.lab, self.faults = lab, []
        self.page = browser.new_page(viewport=WINDOW)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        news = self.page.get_by_role("button", name="No", exact=True)
        self.page.add_locator_handler(
            news, lambda button: button.click()
        )  # the question lies over the notebook
        self.page.goto(f"http://127.0.0.1:{lab.port}/lab/tree/{notebook}?reset&token={TOKEN}")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        self.until_idle()

    def until_idle(self) -> None:
        """Until a kernel is there, is connected to the page, and has nothing to do."""

        def idle() -> bool:
            kernel = self.lab.kernel()
            return bool(kernel and kernel["connections"] and kernel["execution_state"] == "idle")

        self.eventually(idle)
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")

    def eventually(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come true"
            self.page.wait_for_timeout(200)

    def menu(self, *names: str) -> None:
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{names[0]}')")
        for name in names[1:]:
            self.page.click(f".lm-Menu-itemLabel:text-is('{name}')")

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function(f"{PROMPTS}.includes('[*]:')")  # what was saved with it has numbers too
        self.page.wait_for_function(f"{PROMPTS}.every((each) => /\\d/.test(each))", timeout=RUN_MS)

    def run_code(self, code: str) -> str:
        """Type a cell at the end and run it; what it prints."""
        before = self.page.locator(".jp-Notebook .jp-Cell").count()
        self.page.locator(".jp-Notebook .jp-Cell").last.locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        self.page.wait_for_function(
            f"document.querySelectorAll('.jp-Notebook .jp-Cell').length === {before + 1}"
        )
        self.page.keyboard.press("Enter")
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Control+Enter")
        self.page.wait_for_function(f"/\\d/.test({LAST_PROMPT})", timeout=RUN_MS)
        outputs = self.page.locator(".jp-Notebook .jp-Cell").last.locator(".jp-OutputArea-output")
        return "\n".join(outputs.all_text_contents())

    def widget(self, canvas: str, number: int = 0) -> Any:
        """The widget that has this canvas; `number`: of those that have one."""
        return self.page.locator(f".sgviz:has(canvas[data-canvas={canvas}])").nth(number)

    def theme(self, name: str) -> None:
        self.menu("Settings", "Theme", name)
        self.page.wait_for_function(f"document.body.dataset.jpThemeName === '{name}'")

    def restart(self) -> None:
        """Restart the kernel, as the menu does it."""
        self.menu("Kernel", "Restart Kernel…")
        self.page.click(".jp-Dialog button.jp-mod-accept")
        self.page.wait_for_timeout(500)
        self.until_idle()

    def errors(self) -> list[str]:
        """What stands in red under the cells."""
        found: list[str] = self.page.evaluate(ERRORS)
        return found

    def screenshot(self, name: str, widget: Any = None) -> None:
        """Keep what is to be seen, for people: beside the test's temporary files."""
        (widget or self.page).screenshot(path=self.lab.folder.parent / f"{name}.png")

    def close(self) -> None:
        """Shut the kernel down, as the menu does it, and close the page."""
        self.menu("Kernel", "Shut Down Kernel")
        self.eventually(lambda: self.lab.kernel() is None)
        self.page.close()


def number_in(widget: Any, name: str) -> float:
    """The number that the widget shows under this name."""
    text = widget.locator(f"b[data-n={name}]").text_content()
    found = re.search(r"[\d.,]+", text)
    assert found is not None, f"{name} shows {text!r}"
    return float(found[0].replace(",", ""))
