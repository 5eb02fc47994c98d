"""The live notebooks in JupyterLab itself, in a headless Chromium with a clean profile: run, watched and clicked.

Screenshots stay beside the test's temporary files (`pytest --basetemp` chooses where).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from lab_page import Lab, LabPage, number_in, running_lab
from lab_process import kernels

sys.path.insert(0, str(Path(__file__).parents[1] / "viz"))
from viz_page_tools import CHROMIUM, COLOURS

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine"),
]
LIVE = {"kv-bar": 4, "lines": 4, "strip": 3, "lanes": 4, "load": 4, "kv-map": 4, "tree": 4, "journey": 4}
ROW = 13  # pixels of a lane
# the lane with most of a colour, found as a person finds it: with the eyes
WIDEST = """(canvas, colour) => {
  const ratio = canvas.width / canvas.clientWidth, row = 13 * ratio, pen = canvas.getContext("2d");
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  let best = [-1, -1];
  for (let i = 0; (i + 1) * row < canvas.height - 14 * ratio + 1; i++) {
    const data = pen.getImageData(0, Math.round((i + 0.5) * row), canvas.width, 1).data;
    let count = 0;
    for (let k = 0; k < data.length; k += 4) count += data[k] === r && data[k + 1] === g && data[k + 2] === b;
    if (count > best[1]) best = [i, count];
  }
  return best; }"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, lab: Lab, notebook: str) -> LabPage:
    """The notebook after all of its cells have run without an error."""
    page = LabPage(browser, lab, notebook)
    page.run_all()
    assert page.errors() == []
    return page


def colours_of(page: LabPage, canvas: str, number: int = 0) -> int:
    found: int = page.page.locator(f"canvas[data-canvas={canvas}]").nth(number).evaluate(COLOURS)
    return found


def pictures(page: LabPage, name: str, canvases: tuple[str, ...]) -> None:
    for scheme in ("Dark", "Light"):
        page.theme(f"JupyterLab {scheme}")
        page.page.wait_for_timeout(600)
        for canvas in canvases:
            page.screenshot(f"{name}-{canvas}-{scheme.lower()}", page.widget(canvas))


def test_the_dashboard_is_watched_steered_and_asked(browser: Any, lab: Lab) -> None:
    page = opened(browser, lab, "05_live_dashboard.ipynb")
    for name, least in LIVE.items():
        assert colours_of(page, name) >= least, name
    pictures(page, "05", ("kv-bar", "load", "kv-map", "tree", "journey"))
    the_load_is_stopped_and_started(page)
    a_slow_request_is_explained(page)
    two_copies(page)
    a_restart_leaves_the_pictures_and_nothing_else(page)
    page.close()


def the_load_is_stopped_and_started(page: LabPage) -> None:
    load = page.widget("load")
    button = load.locator("button[data-act=load]")
    assert button.text_content() == "stop"
    button.click()
    page.eventually(lambda: button.text_content() == "start" and number_in(load, "in_flight") == 0)
    sent = number_in(load, "sent")
    page.page.wait_for_timeout(700)
    assert number_in(load, "sent") == sent
    load.locator("input[data-knob=rate]").fill("30")
    button.click()
    page.eventually(lambda: number_in(load, "sent") > sent + 20)
    page.eventually(lambda: number_in(page.widget("lanes"), "waiting") > 3)


def a_slow_request_is_explained(page: LabPage) -> None:
    dashboard, seq = page.widget("lanes"), "(each) => Number(each.dataset.seq)"
    dashboard.locator("button[data-act='pause view']").click()
    page.eventually(lambda: " of " in dashboard.locator("[data-n=when]").text_content())
    canvas = dashboard.locator("canvas[data-canvas=lanes]")
    page.page.wait_for_timeout(500)
    held, others = dashboard.evaluate(seq), page.widget("kv-map").evaluate(seq)
    queue = dashboard.evaluate("(each) => each.style.getPropertyValue('--queue')")
    lane, width = canvas.evaluate(WIDEST, queue)
    assert width > 30
    canvas.click(position={"x": 200, "y": ROW * lane + ROW // 2})
    said = dashboard.locator("[data-n=explanation]")
    page.eventually(lambda: re.match(r"load-\w+-\d+ took [\d.,]+ ms", said.text_content()))
    page.screenshot("05-explained-light", dashboard)
    assert re.search(r"\d% +(kv|head_of_line) ", said.text_content())
    assert dashboard.evaluate(seq) == held < page.widget("kv-map").evaluate(seq)
    assert others < page.widget("kv-map").evaluate(seq)  # the engine went on


def two_copies(page: LabPage) -> None:
    page.run_code("display(dashboard)\nother = sgviz.viz.Dashboard(rec)\nother")
    page.page.locator("canvas[data-canvas=lanes]").nth(2).wait_for()
    first, copy, other = (page.widget("lanes", number) for number in range(3))
    when = lambda widget: widget.locator("[data-n=when]").text_content()  # noqa: E731
    page.eventually(lambda: when(copy) == when(first) and " of " in when(first))
    assert " of " not in when(other)
    copy.locator("button[data-act='pause view']").click()
    page.eventually(lambda: " of " not in when(first) and " of " not in when(copy))
    other.locator("button[data-act='pause view']").click()
    page.eventually(lambda: " of " in when(other))
    page.page.wait_for_timeout(500)
    held = when(other)
    now = when(first)
    page.eventually(lambda: when(first) != now and when(copy) != now)
    assert when(other).partition(" of ")[0] == held.partition(" of ")[0]
    for number in range(3):
        assert colours_of(page, "lanes", number) >= 4
    page.run_code("other.close()")
    page.eventually(lambda: page.page.locator("canvas[data-canvas=lanes]").count() == 2)


def a_restart_leaves_the_pictures_and_nothing_else(page: LabPage) -> None:
    url = page.page.locator("a[href$='/viz']").get_attribute("href").removesuffix("/viz")
    httpx2.get(url + "/health", trust_env=False).raise_for_status()
    page.eventually(lambda: len(kernels(page.lab.process)) == 1)
    (before,) = kernels(page.lab.process)
    page.restart()
    page.eventually(lambda: not before.is_running())
    (after,) = kernels(page.lab.process)
    assert after.children() == []
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url + "/health", trust_env=False)
    for name in LIVE:
        assert colours_of(page, name) >= 4, name
    button = page.page.locator("button[data-act=load]")
    button.click()
    page.eventually(lambda: "its kernel has ended" in page.widget("load").text_content())
    page.screenshot("05-restarted")
    assert page.errors() == [] and page.faults == []


def settled(page: LabPage, load: Any) -> int:
    """How many requests had finished once none did for a second and a half."""
    before = -1
    while before != (before := number_in(load, "finished")):
        page.page.wait_for_timeout(1500)
    return before


def test_the_scheduler_is_stepped_while_a_load_runs(browser: Any, lab: Lab) -> None:
    page = opened(browser, lab, "06_step_the_scheduler.ipynb")
    stepper, load = page.page.locator(".sgviz:has(.panes)"), page.widget("load")
    where = lambda: stepper.locator("[data-n=where]").text_content()  # noqa: E731
    page.eventually(lambda: number_in(load, "finished") > 3 and where() == "running")
    stepper.locator("button[data-act=pause]").click()
    page.eventually(lambda: where().startswith("stop "))
    page.eventually(lambda: "radix tree" in stepper.locator(".panes").text_content())
    settled(page, load)  # what was computed before it was parked still reaches its clients
    for _ in range(3):
        before = where()
        stepper.locator("button[data-act='next decision']").click()
        seen: list[str] = []

        def stopped(before: str = before, seen: list[str] = seen) -> bool:
            seen.append(where())  # read once: it runs in between
            return seen[-1].startswith("stop ") and seen[-1] != before

        page.eventually(stopped)
        assert re.match(r"stop \d+ at (admit|scan|chunk|request|tree)\.", seen[-1]), seen[-1]
    finished = settled(page, load)
    assert number_in(load, "sent") > finished
    page.screenshot("06-light")
    page.theme("JupyterLab Dark")
    page.page.wait_for_timeout(600)
    page.screenshot("06-dark")
    said = page.run_code("(debugger.where.event.kind, debugger.where.stop_no)")
    kind, number = re.findall(r"'([\w.]+)', (\d+)", said)[0]
    assert where().startswith(f"stop {number} at {kind},")
    stepper.locator("button[data-act=continue]").click()
    page.eventually(lambda: where() == "running" and number_in(load, "finished") > finished + 3)
    stepper.locator("button[data-act=pause]").click()
    page.eventually(lambda: where().startswith("stop "))
    (before,) = kernels(lab.process)
    page.restart()  # of a parked scheduler
    page.eventually(lambda: not before.is_running())
    assert page.errors() == [] and page.faults == []
    page.close()


def test_ending_the_lab_leaves_nothing(lab: Lab) -> None:
    name = "05_live_dashboard.ipynb"
    lab.client.ask(
        "/api/sessions", {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
    )
    deadline = time.monotonic() + 60
    while not (lab.kernel() and (ports := lab.ports())):
        assert time.monotonic() < deadline, lab.process.err.read_text()
        time.sleep(0.1)
    code, alive = lab.process.interrupt()
    assert code == 0 and alive == [], lab.process.err.read_text()
    listening = {
        link.laddr.port for link in psutil.net_connections("inet") if link.status == psutil.CONN_LISTEN
    }
    assert not listening & {*ports, lab.port}
    assert list((lab.folder.parent).glob("sgviz-*")) == []
