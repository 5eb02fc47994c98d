"""The page /viz in a headless Chromium, under load: it draws, says what the server says, and comes back."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from viz_page_tools import CHROMIUM, COLOURS, SHOWN, loaded, number, state

from sgviz.engine import Engine
from sgviz.messages.debug import LEASE_S

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine"),
]
SMALL = {"device": "mock", "mock_step_ms": 6, "max_total_tokens": 1024, "chunked_prefill_size": 64}
COUNTS = ("running", "free", "evictable", "protected", "private_total")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    with Engine("tiny-llama", enable_debugger=True, **SMALL) as engine:
        yield engine, engine.serve(port=0).url


@pytest.fixture
def page(browser: Any, served: tuple[Engine, str]) -> Iterator[Any]:
    """The open page; nothing may go wrong in its console."""
    faults: list[str] = []
    opened = browser.new_page(viewport={"width": 1400, "height": 1200})
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto(served[1] + "/viz")
    yield opened
    opened.close()
    assert faults == []


def drawn(page: Any, more: int = 3) -> None:
    """Wait until it was drawn so many times more."""
    now = page.evaluate("Number(document.getElementById('sgviz').dataset.drawn || 0)")
    page.wait_for_function(
        f"Number(document.getElementById('sgviz').dataset.drawn) >= {now + more}", timeout=30_000
    )


def test_it_draws_and_its_numbers_are_the_server_s(page: Any, served: tuple[Engine, str]) -> None:
    engine, url = served
    with loaded(engine, clients=8):
        drawn(page, 10)
        for _ in range(8):
            drawn(page, 1)
            shown = page.evaluate(SHOWN)
            told = state(url, shown["seq"])
            assert number(shown["waiting"]) == len(told["waiting"])
            expected = {name: told[name] for name in COUNTS[1:]} | {"running": len(told["running"])}
            assert {name: number(shown[name]) for name in COUNTS} == expected
        for name in ("kv-bar", "lines", "strip", "lanes", "kv-map", "tree", "journey"):
            colours = page.eval_on_selector(f"canvas[data-canvas={name}]", COLOURS)
            assert colours >= 3, f"{name} has {colours} colours"


def test_a_dropped_connection_is_taken_up_without_a_gap(page: Any, served: tuple[Engine, str]) -> None:
    engine, _ = served
    with loaded(engine, clients=4):
        drawn(page, 5)
        before = page.evaluate(SHOWN)["seq"]
        page.context.set_offline(True)
        page.evaluate("document.getElementById('sgviz').shown.drop()")
        page.wait_for_function(
            "document.querySelector('[data-n=connection]').textContent.includes('not connected')"
        )
        page.wait_for_timeout(1500)
        page.context.set_offline(False)
        page.wait_for_function(
            "document.querySelector('[data-n=connection]').textContent === ''", timeout=30_000
        )
        drawn(page, 3)
    shown = page.evaluate("document.getElementById('sgviz').shown.stage.view")
    assert shown["seq"] > before
    planned = [sample[0] for sample in shown["dashboard"]["samples"]]
    own = engine.recording().freeze().iterations.planned_ms
    lost = own[(own > planned[0]) & (own < planned[-1])]
    # a sample at most every 20 ms: no planned batch is further from one than that
    assert all(any(0 <= at - sample < 20.0 for sample in planned) for at in lost.tolist())


def test_the_view_can_be_held_and_a_request_explained(page: Any, served: tuple[Engine, str]) -> None:
    engine, _ = served
    with loaded(engine, clients=4):
        drawn(page, 5)
        page.click("button[data-act='pause view']")
        page.wait_for_function("document.querySelector('[data-n=when]').textContent.includes(' of ')")
        held = page.evaluate(SHOWN)
        page.wait_for_timeout(600)
        assert page.evaluate(SHOWN) == held
        page.click("canvas[data-canvas=lanes]", position={"x": 200, "y": 7})
        lane = page.evaluate("document.getElementById('sgviz').shown.stage.view.dashboard.lanes[0].rid")
        page.wait_for_function(
            f"document.querySelector('[data-n=explanation]').textContent.startsWith('{lane} took')"
        )


def test_a_lost_connection_leaves_the_view_where_it_is(page: Any, served: tuple[Engine, str]) -> None:
    engine, _ = served
    line = "document.querySelector('[data-n=connection]').textContent"
    wanted = "document.getElementById('sgviz').shown.stage.ctx.wanted.at"
    with loaded(engine, clients=2):
        drawn(page, 5)
        page.click("button[data-act='pause view']")
        held = page.evaluate(wanted)
        assert held is not None
        page.context.set_offline(True)
        page.evaluate("document.getElementById('sgviz').shown.drop()")
        page.wait_for_function(f"{line}.includes('not connected')")
        page.context.set_offline(False)
        page.wait_for_function(f"{line} === ''", timeout=30_000)
        drawn(page, 1)
        assert page.evaluate(wanted) == held == page.evaluate(SHOWN)["seq"]
        page.evaluate("document.getElementById('sgviz').shown.stage.ctx.wish({ at: 1e9, clock: 'event' })")
        page.wait_for_function(f"{wanted} === null", timeout=30_000)  # there is no such moment: the present


def test_the_stepper_parks_the_scheduler_and_lets_it_go(page: Any, served: tuple[Engine, str]) -> None:
    engine, _ = served
    with loaded(engine, clients=3):
        drawn(page, 3)
        page.click("button[data-act=attach]")
        page.wait_for_function("document.querySelector('[data-act=attach]').textContent === 'let go'")
        page.click("button[data-act=pause]")
        where = "document.querySelector('[data-n=where]').textContent"
        page.wait_for_function(f"{where}.startsWith('stop ')")
        first = page.evaluate(where)
        page.wait_for_function("document.querySelector('.stepper .panes').textContent.includes('KV pool')")
        page.click("button[data-act='next decision']")
        page.wait_for_function(f"{where}.startsWith('stop ') && {where} !== {first!r}", timeout=30_000)
        assert engine.internal_state()["parked"]
        page.click("button[data-act=attach]")
        page.wait_for_function(f"{where}.startsWith('not attached') || {where}.startsWith('let go')")
        assert not engine.internal_state()["parked"]


def test_what_was_asked_before_it_was_let_go_is_not_shown_after_it(
    page: Any, served: tuple[Engine, str]
) -> None:
    late: list[Any] = []
    page.route(
        "**/sgviz/debug",
        lambda route: late.append(route) if '"look"' in route.request.post_data else route.continue_(),
    )
    where = "document.querySelector('[data-n=where]').textContent"
    with loaded(served[0], clients=1):
        page.click("button[data-act=attach]")
        page.click("button[data-act=pause]")
        page.wait_for_function(f"{where}.startsWith('stop ')")
        page.click("button[data-act=attach]")
        page.wait_for_function(f"{where}.startsWith('not attached')")
        with page.expect_response("**/sgviz/debug") as answer:
            late[0].continue_()
        assert "not attached" in answer.value.json()["error"]["message"]
        page.wait_for_timeout(200)  # for whoever would show it
        assert page.evaluate(where).startswith("not attached: ")


def test_closing_the_page_lets_the_scheduler_go(browser: Any, served: tuple[Engine, str]) -> None:
    engine, url = served
    page = browser.new_page()
    page.goto(url + "/viz")
    with loaded(engine, clients=2):
        drawn(page, 2)
        page.click("button[data-act=attach]")
        page.wait_for_function("document.querySelector('[data-act=attach]').textContent === 'let go'")
        page.click("button[data-act=pause]")
        page.wait_for_function("document.querySelector('[data-n=where]').textContent.startsWith('stop ')")
        page.close()
        deadline = time.monotonic() + LEASE_S / 2  # the lease alone would let it go later than that
        while engine.internal_state()["parked"]:
            assert time.monotonic() < deadline, "closing the page did not let it go"
            time.sleep(0.05)


def test_with_a_key_page_and_stream_need_it(browser: Any) -> None:
    with Engine("tiny-llama", admin_api_key="sesame", **SMALL) as engine:
        url = engine.serve(port=0).url
        for path in ("/viz", "/sgviz/events?what=kv"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url + path, timeout=30)
            assert refused.value.code == 401 and b"Dashboard" not in refused.value.read()
        page = browser.new_page()
        page.goto(url + "/viz")
        page.fill("input", "wrong")
        page.click("button")
        page.wait_for_function("document.getElementById('said').textContent.includes('not the right one')")
        page.fill("input", "sesame")
        page.click("button")
        page.wait_for_selector("#sgviz[data-drawn]", timeout=30_000)
        assert "stepper" not in page.inner_html("#sgviz")
        page.close()


def test_leaving_pages_leave_nothing(browser: Any, served: tuple[Engine, str]) -> None:
    engine, url = served
    engine.generate("hello")
    before = threading.active_count()
    for _ in range(3):
        page = browser.new_page()
        page.goto(url + "/viz")
        page.wait_for_selector("#sgviz[data-drawn]", timeout=30_000)
        page.close()
    assert threading.active_count() <= before + 2  # of the pool that all folds share
