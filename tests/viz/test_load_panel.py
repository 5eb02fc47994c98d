"""The load panel: its buttons and sliders do what its methods do, and closing it ends the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
import msgspec
import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.viz import LoadPanel

SMALL = {"rate": 100.0, "prompt_tokens": 16, "output_tokens": 4}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=1024) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    alive = ipywidgets.widgets.widget._instances
    before = threading.active_count(), len(alive)
    yield
    assert (threading.active_count(), len(alive)) == before


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def drawn(panel: LoadPanel) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(panel.view)["load"]
    return found


def test_it_is_used_without_a_browser(engine: Engine) -> None:
    with LoadPanel(engine, **SMALL) as panel:
        assert not panel.running and panel.rate == 100.0
        panel.start()
        eventually(lambda: panel.counts.finished >= 5)
        panel.rate = 50
        panel.shared_share = 0.25
        assert (panel.rate, panel.shared_share, panel.prompt_tokens) == (50.0, 0.25, 16)
        panel.stop()
        eventually(lambda: panel.counts.in_flight == 0)
        eventually(lambda: drawn(panel)["counts"]["finished"] == panel.counts.finished)
        eventually(lambda: drawn(panel)["shape"]["rate"] == 50.0 and not drawn(panel)["running"])
        with pytest.raises(BadRequest, match="rate"):
            panel.rate = 0
        with pytest.raises(BadRequest, match="did you mean 'prompt_tokens'"):
            panel.change(prompt_token=5)


def test_what_is_clicked_and_slid_acts(engine: Engine) -> None:
    with LoadPanel(engine, **SMALL) as panel:
        panel._handle_custom_msg({"load": "start"}, [])
        eventually(lambda: drawn(panel)["running"])
        panel._handle_custom_msg({"load": {"rate": None, "concurrency": 2, "output_tokens": 6}}, [])
        assert panel.shape.rate is None and (panel.concurrency, panel.output_tokens) == (2, 6)
        eventually(lambda: panel.counts.finished >= 5)
        panel._handle_custom_msg({"load": {"prompt_tokens": 10**9}}, [])
        eventually(lambda: "context" in drawn(panel)["error"])
        assert panel.prompt_tokens == 16
        panel._handle_custom_msg({"load": "stop"}, [])
        assert not panel.running
        eventually(lambda: drawn(panel)["error"] == "")
        panel._handle_custom_msg({"load": ["nonsense"]}, [])
        panel._handle_custom_msg({"wish": {}}, [])


def test_sliders_end_where_the_model_does(engine: Engine) -> None:
    with LoadPanel(engine, **SMALL) as panel:
        limits, context = drawn(panel)["limits"], engine.pipeline.scheduler_info.context_len
        assert limits["prompt_tokens"] + panel.output_tokens <= context
        panel.change(prompt_tokens=limits["prompt_tokens"])
        most = min(1024, context - panel.prompt_tokens)
        eventually(lambda: drawn(panel)["limits"]["output_tokens"] == most)


def test_a_page_without_a_kernel_shows_a_table(engine: Engine) -> None:
    with LoadPanel(engine, **SMALL) as panel:
        bundle = panel._repr_mimebundle_()
        assert bundle is not None and "application/vnd.jupyter.widget-view+json" in bundle[0]
        assert "<th>prompt_tokens</th><td>16</td>" in bundle[0]["text/html"]


def test_the_view_changes_only_when_something_did(engine: Engine) -> None:
    with LoadPanel(engine, **SMALL) as panel:
        before = panel.view
        time.sleep(0.3)
        assert panel.view == before


def test_two_panels_on_one_engine_do_not_disturb_each_other(engine: Engine) -> None:
    with LoadPanel(engine, **SMALL) as one, LoadPanel(engine, **SMALL) as other:
        one.start()
        other.start()
        eventually(lambda: one.counts.finished >= 10 and other.counts.finished >= 10)
        one.stop()
        assert other.running and one.counts.failed == other.counts.failed == 0


def test_a_shape_that_cannot_be_opens_nothing(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="rate"):
        LoadPanel(engine, rate=-1)
