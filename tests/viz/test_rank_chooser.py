"""The rank chooser of /viz and of the widgets in a headless Chromium: one scheduler at a time, at the same moment."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from viz_page_tools import CHROMIUM, SHOWN, loaded, number
from widget_page import WidgetPage

from sgviz.engine import Engine
from sgviz.viz import Dashboard, Journey

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine"),
]
ROOT = "document.getElementById('sgviz')"
CHOOSER = "select[data-n=rank]"
POOLS = ("free", "evictable", "protected", "private_total")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    settings = {"max_total_tokens": 1024, "chunked_prefill_size": 64, "enable_debugger": True}
    with Engine("tiny-llama", device="mock", mock_step_ms=6, dp_size=2, **settings) as engine:
        engine.generate(["hello there", "a longer text " * 6], {"max_new_tokens": 8})
        yield engine, engine.serve(port=0).url


def pools(url: str, rank: int) -> list[int]:
    with urllib.request.urlopen(f"{url}/sgviz/state?rank={rank}") as answer:
        told = json.load(answer)
    return [told[name] for name in POOLS]


def test_the_page_shows_the_rank_that_is_chosen(browser: Any, served: tuple[Engine, str]) -> None:
    engine, url = served
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1400, "height": 1200})
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url + "/viz")
    page.wait_for_function(f"{ROOT}.dataset.rank === '0'")
    assert page.eval_on_selector_all(f"{CHOOSER} option", "all => all.map((one) => one.textContent)") == [
        "0",
        "1",
    ]
    assert "of rank 0" in page.inner_text("section.stepper h2")
    for rank in (1, 0, 1):
        page.select_option(CHOOSER, str(rank))
        page.wait_for_function(f"{ROOT}.dataset.rank === '{rank}'")
        shown = page.evaluate(SHOWN)
        assert [number(shown[name]) for name in POOLS] == pools(url, rank)
        assert page.evaluate("location.search") == f"?rank={rank}"
    with loaded(engine, clients=6):
        page.wait_for_function(f"Number({ROOT}.dataset.drawn) > 20")
        page.click("button[data-act='pause view']")
        page.wait_for_function("document.querySelector('[data-n=when]').textContent.includes(' of ')")
        before = page.evaluate(f"{ROOT}.shown.stage.view.t_ms")
        page.select_option(CHOOSER, "0")  # the same moment on the other
        page.wait_for_function(f"{ROOT}.dataset.rank === '0'")
        after = page.evaluate(f"{ROOT}.shown.stage.view.t_ms")
        assert 0 <= before - after < 1000
    page.reload()
    page.wait_for_function(f"{ROOT}.dataset.rank === '0'")
    page.close()
    assert faults == []


def test_a_widget_has_the_chooser_also_where_it_has_no_scrubber(
    browser: Any, served: tuple[Engine, str]
) -> None:
    engine = served[0]
    with Dashboard(engine, rank=1) as board, Journey(engine) as journey:
        shown = WidgetPage(browser, [board, journey])
        try:
            shown.run(0.5)
            page = shown.page
            assert page.locator(CHOOSER).count() == 2
            assert [each.shown.rank for each in (board, journey)] == [1, 0]
            page.locator(CHOOSER).nth(0).select_option("0")
            page.locator(CHOOSER).nth(1).select_option("1")
            for _ in range(40):
                shown.run(0.1)
                if (board.shown.rank, journey.shown.rank) == (0, 1):
                    break
            assert (board.shown.rank, journey.shown.rank) == (0, 1)
            mine = engine.recording().rank(1).rids
            assert journey.shown.journey.rid in mine  # type: ignore[union-attr]
            assert shown.faults == []
        finally:
            shown.close()


def test_one_scheduler_has_no_chooser(browser: Any) -> None:
    with Engine("tiny-llama", device="mock") as engine:
        page = browser.new_page()
        page.goto(engine.serve(port=0).url + "/viz")
        page.wait_for_function(f"Number({ROOT}.dataset.drawn) > 0")
        assert page.locator(CHOOSER).count() == 0 and page.evaluate(f"{ROOT}.dataset.rank") is None
        page.close()
