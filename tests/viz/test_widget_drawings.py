"""The widgets drawn by a headless Chromium, wide and narrow, light and dark; and used with the mouse under load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from viz_page_tools import CHROMIUM, COLOURS
from widget_page import WidgetPage

from sgviz.engine import Engine
from sgviz.viz import Dashboard, Journey, KVMap, LoadPanel, OverlapLanes, RadixTree, Stepper
from sgviz.viz.style import host_colours, theme
from sgviz.viz.widgets import SgvizWidget

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine"),
]
CANVASES = {
    "kv-bar": 3, "lines": 3, "strip": 2, "lanes": 3, "kv-map": 3, "tree": 3, "overlap": 5, "journey": 3, "load": 3,
}  # fmt: skip
# text or a control that does not fit its box; scrolling boxes and cut lines with dots are meant to be so
SPREAD = """() => [...document.querySelectorAll(".cell *")].filter((each) => { const style = getComputedStyle(each);
  return each.clientWidth && each.scrollWidth > each.clientWidth + 1 && each.tagName !== "INPUT" &&
    !["visible", "auto", "scroll"].includes(style.overflowX) && style.textOverflow !== "ellipsis";
}).map((each) => each.outerHTML.slice(0, 200))"""
HAS = """([canvas, colour]) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  for (let i = 0; i < data.length; i += 4) if (data[i] === r && data[i + 1] === g && data[i + 2] === b) return true;
  return false; }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = {"max_total_tokens": 1024, "chunked_prefill_size": 64, "event_loop": "overlap"}
    with Engine("tiny-llama", device="mock", mock_step_ms=6, enable_debugger=True, **settings) as made:
        yield made


@pytest.fixture(scope="module")
def load(engine: Engine) -> Iterator[LoadPanel]:
    with LoadPanel(engine, rate=12.0, prompt_tokens=40, output_tokens=20) as panel:
        yield panel


def shown(browser: Any, widgets: list[SgvizWidget], scheme: str = "light", width: int = 1100) -> WidgetPage:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    return WidgetPage(context, widgets, theme(scheme).ground)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 600)])
def test_all_widgets_draw(
    browser: Any, engine: Engine, load: LoadPanel, scheme: str, width: int, tmp_path: Path
) -> None:
    rec = engine.recording()
    load.start()
    with ExitStack() as stack:
        made = [Dashboard(rec), KVMap(rec), RadixTree(rec), OverlapLanes(rec, seconds=0.3), Journey(rec)]
        widgets: list[SgvizWidget] = [stack.enter_context(widget) for widget in made]
        page = shown(browser, [*widgets, load], scheme, width)
        stack.callback(page.close)
        page.run(3.0)
        page.page.screenshot(path=tmp_path / f"widgets-{scheme}-{width}.png", full_page=True)
        for name, least in CANVASES.items():
            colours = page.page.eval_on_selector(f"canvas[data-canvas={name}]", COLOURS)
            assert colours >= least, f"{name} has {colours} colours"
        canvas = page.page.query_selector("canvas[data-canvas=overlap]")
        for colour in (host_colours(scheme).hidden, theme(scheme).decode, host_colours(scheme).wait):
            assert page.page.evaluate(HAS, [canvas, colour]), colour
        assert page.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.page.evaluate(SPREAD) == []
        ground = page.page.evaluate("getComputedStyle(document.querySelector('.sgviz')).backgroundColor")
        red = int(theme(scheme).ground[1:3], 16)
        assert ground.startswith(f"rgb({red},")


def test_the_load_is_shaped_with_the_mouse(browser: Any, load: LoadPanel) -> None:
    load.stop()
    page = shown(browser, [load])
    button = "button[data-act=load]"
    page.until(f"document.querySelector('{button}').textContent === 'start'")
    page.page.click(button)
    page.until(f"document.querySelector('{button}').textContent === 'stop'")
    assert load.running
    page.page.eval_on_selector(
        "input[data-knob=rate]",
        "(each) => { each.value = 20; for (const what of ['input', 'change']) each.dispatchEvent(new Event(what)); }",
    )
    page.run(0.5)
    assert load.rate == 20.0
    page.page.select_option("[data-n=arrivals]", "loop")
    page.run(0.3)
    assert load.rate is None
    page.page.focus("input[data-knob=concurrency]")
    page.page.keyboard.press("ArrowRight")
    page.run(0.5)
    assert load.concurrency == 9
    page.until("Number(document.querySelector('b[data-n=finished]').textContent.replace(',', '')) > 5")
    page.page.click(button)
    page.run(0.3)
    assert not load.running
    page.page.select_option("[data-n=arrivals]", "rate")
    page.run(0.3)
    assert load.rate == 20.0
    page.close()


def test_the_scrubber_moves_on_both_clocks(browser: Any, engine: Engine, load: LoadPanel) -> None:
    load.start()
    with OverlapLanes(engine.recording(), seconds=0.2) as lanes, Dashboard(engine.recording()) as other:
        page = shown(browser, [lanes, other])
        page.run(0.5)
        mine = "document.querySelectorAll('.sgviz')[0]"
        when = f"{mine}.querySelector('[data-n=when]').textContent"
        page.page.locator("[data-n=clock]").first.select_option("iteration")
        page.page.locator("[data-act='pause view']").first.click()
        page.until(f"{when}.includes(' of ')")
        page.run(0.5)  # until the kernel holds as well
        before = lanes.shown
        page.page.locator("[data-act=back]").first.click()
        page.until(f"{when}.includes('iteration {before.iteration - 1} ')")
        assert lanes.shown.iteration == before.iteration - 1
        page.page.locator("[data-n=clock]").first.select_option("ms")
        page.page.locator("input[data-n=scrubber]").first.evaluate(
            "(e) => { e.value = (Number(e.min) + Number(e.max)) / 2; e.dispatchEvent(new Event('input')); }"
        )
        page.run(0.5)
        middle = lanes.shown
        assert middle.oldest_ms < middle.t_ms < before.t_ms
        page.page.locator("[data-n=stretch]").first.select_option("0.05")
        page.run(0.5)
        assert lanes.shown.overlap is not None and lanes.shown.overlap.seconds == 0.05
        assert lanes.shown.seq == middle.seq and other.shown.seq > middle.seq  # the other goes on
        box = page.page.locator("canvas[data-canvas=overlap]").bounding_box()
        page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 83)
        page.until(f"{mine}.textContent.includes('device: ')")
        page.page.locator("[data-act='pause view']").first.click()
        page.until(f"!{when}.includes(' of ')")
        page.close()
    load.stop()


def test_the_stepper_parks_steps_one_request_and_changes_the_policy(
    browser: Any, engine: Engine, load: LoadPanel, tmp_path: Path
) -> None:
    load.change(rate=12.0, concurrency=8)
    load.start()
    with engine.debugger() as debugger, Stepper(debugger) as stepper:
        page = shown(browser, [stepper], "dark", 600)
        where = "document.querySelector('[data-n=where]').textContent"
        page.run(0.3)
        page.page.click("button[data-act=pause]")
        page.until(f"{where}.startsWith('stop ')")
        page.until("document.querySelector('.panes').textContent.includes('radix tree')")
        debugger.run("queue.entered")  # somebody who has nothing yet
        page.run(1.5)
        rid = debugger.waiting[-1].rid
        page.page.fill("[data-n=rid]", rid)
        page.page.press("[data-n=rid]", "Tab")
        page.until("document.querySelector('.panes').textContent.includes('ReqState of')")
        page.page.click("button[data-act='first token']")
        page.until(f"{where}.includes('tokens.sampled')")
        assert debugger.where is not None and debugger.where.kind == "tokens.sampled"
        page.page.select_option("[data-limit=schedule_policy]", "lpm")
        page.page.fill("[data-limit=max_running_requests]", "5")
        page.page.click("button[data-act='change limits']")
        page.run(0.5)
        page.page.click("button[data-act='next iteration']")
        page.until("document.querySelector('[data-limit=max_running_requests]').placeholder === '5'")
        assert debugger.limits.schedule_policy == "lpm" and debugger.limits.max_running_requests == 5
        page.page.click("button[data-act='◀ iteration']")
        page.until(f"{where}.includes('from the recording')")
        page.until("document.querySelector('.panes').textContent.includes('running then')")
        page.page.screenshot(path=tmp_path / "stepper-dark-600.png", full_page=True)
        assert page.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.close()
    load.stop()
