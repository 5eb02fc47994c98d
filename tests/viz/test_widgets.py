"""The widgets without a page: what they send, how often, and that closing them gives everything back."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

import sgviz
from sgviz.engine import Engine
from sgviz.errors import BadRequest, NotFound
from sgviz.events import Event, RingSink
from sgviz.events.schema import RequestDispatched
from sgviz.recording import Recording
from sgviz.viz import Dashboard, Journey, KVMap, RadixTree, Stepper

SHOWS = {Dashboard: "dashboard", KVMap: "kv", RadixTree: "tree", Journey: "journey"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        "tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=512, enable_debugger=True
    ) as made:
        made.generate(["one", "two", "three"], sampling_params={"max_new_tokens": 12})
        yield made


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    threads, widgets = threading.active_count(), len(alive())
    yield
    assert (threading.active_count(), len(alive())) == (threads, widgets)


def alive() -> dict[str, Any]:
    found: dict[str, Any] = ipywidgets.widgets.widget._instances
    return found


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", SHOWS)
def test_a_live_widget_follows_the_engine(kind: Any, engine: Engine) -> None:
    rec = engine.recording()
    with kind(rec) as widget:
        before = widget.shown.seq
        engine.generate("more", sampling_params={"max_new_tokens": 4})
        total = engine.pipeline.ring.total
        eventually(lambda: widget.shown.seq >= total > before)
        assert getattr(widget.shown, SHOWS[kind]) is not None
        others = set(SHOWS.values()) - {SHOWS[kind]}
        assert all(getattr(widget.shown, name) is None for name in others)


@pytest.mark.parametrize("kind", SHOWS)
def test_a_file_looks_like_the_live_run_and_has_a_picture(kind: Any, engine: Engine, tmp_path: Path) -> None:
    rec = engine.recording().freeze()
    rec.save(tmp_path / "run.sgv")
    with kind(sgviz.load(tmp_path / "run.sgv")) as widget:
        assert widget.shown.seq == len(rec) and not widget.shown.live
        data = widget._repr_mimebundle_()[0]
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
        assert "application/vnd.jupyter.widget-view+json" in data


def test_a_click_on_a_request_brings_its_explanation(engine: Engine) -> None:
    rid = engine.recording().rids[0]
    with Dashboard(engine.recording()) as widget:
        widget._handle_custom_msg({"wish": {"rid": rid, "at": None, "node": 0}}, [])
        assert widget.shown.journey is not None and widget.shown.journey.rid == rid
        widget._handle_custom_msg({"wish": {"rid": rid, "at": 40, "node": 0}}, [])
        assert widget.shown.seq == 40 and widget.shown.dashboard is not None
        engine.generate("the view stays where it is", sampling_params={"max_new_tokens": 4})
        time.sleep(0.3)
        assert widget.shown.seq == 40
        widget.show(at=None)
        assert widget.shown.seq > 40


def test_what_cannot_be_shown_is_refused(engine: Engine) -> None:
    rec = engine.recording()
    with pytest.raises(NotFound, match="no request 'nobody'"):
        Journey(rec, "nobody")
    with KVMap(rec) as widget:
        with pytest.raises(BadRequest, match="what is remembered"):
            widget.show(at=10**9)
        assert widget.shown.kv is not None


def test_two_widgets_of_one_recording_do_not_disturb_each_other(engine: Engine) -> None:
    rec = engine.recording()
    with Dashboard(rec) as one, Dashboard(rec) as other:
        one.show(at=30)
        engine.generate("more", sampling_params={"max_new_tokens": 4})
        total = engine.pipeline.ring.total
        eventually(lambda: other.shown.seq >= total)
        assert one.shown.seq == 30


def test_updates_are_coalesced_and_ten_thousand_leave_nothing() -> None:
    """Events come far faster than ten a second; views do not."""
    ring = RingSink(capacity=2000)
    rec = Recording.live(
        ring.snapshot, total=lambda: ring.total, dropped=lambda: ring.dropped, since=ring.since
    )
    began = time.monotonic()
    with Dashboard(rec) as widget:
        for number in range(1, 10_001):
            body = RequestDispatched(rid=f"r{number}")
            ring.put(Event(number, time.monotonic_ns(), "tokenizer_manager", 0, body))
            if number % 500 == 0:
                time.sleep(0.02)
        eventually(lambda: widget.shown.seq == 10_000)
        assert widget.updates <= 2 + (time.monotonic() - began) * 10
        for _ in range(10_000):  # and as many updates of the comm itself
            widget.view = widget.view[:-1] + (" }" if len(widget.view) % 2 else "}")
        assert len(widget.view) < 20_000


def test_the_stepper_s_buttons_drive_the_debugger(engine: Engine) -> None:
    with engine.debugger() as debugger, Stepper(debugger) as widget:
        said: list[dict[str, Any]] = []
        widget.send = lambda content, buffers=None: said.append(content)

        def press(call: int, **body: object) -> dict[str, Any]:
            widget._handle_custom_msg({"call": call, "body": body}, [])
            eventually(lambda: any(each["call"] == call for each in said))
            return next(each for each in said if each["call"] == call)

        press(1, op="pause")
        thread = threading.Thread(target=engine.generate, args=("hello",), daemon=True)
        thread.start()
        status = press(2, op="wait", after=0, timeout_s=5)["answer"]["status"]
        assert status["parked"] and debugger.parked
        assert press(3, op="look", what=["pools"])["answer"]["view"]["pools"]["total"] == 512
        assert press(4, op="past", by=-1)["answer"]["count"] > 0
        assert "no such debugger command" in press(5, op="nonsense")["error"]
        press(6, op="resume")
        thread.join(20)
        assert not thread.is_alive()
        assert "text/html" in widget._repr_mimebundle_()[0]
