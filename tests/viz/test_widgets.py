"""The widgets without a page: what they send, how often, and that closing them gives everything back."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import nbformat
import pytest

import sgviz
from sgviz.engine import Engine
from sgviz.errors import BadRequest, NotFound
from sgviz.events import Event, RingSink
from sgviz.events.schema import RequestDispatched
from sgviz.recording import Recording
from sgviz.viz import Dashboard, Journey, KVMap, OverlapLanes, RadixTree, Stepper

SHOWS = {Dashboard: "dashboard", KVMap: "kv", RadixTree: "tree", OverlapLanes: "overlap", Journey: "journey"}


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


def test_one_scrubber_has_two_clocks(engine: Engine) -> None:
    rec = engine.recording().freeze()
    middle = rec.at(count=len(rec) // 2)
    with Dashboard(rec) as widget, OverlapLanes(rec, seconds=0.02) as lanes:
        for clock, at in (("iteration", middle.iteration), ("ms", middle.t_ms)):
            widget._handle_custom_msg({"wish": {"at": at, "clock": clock, "rid": "", "node": 0}}, [])
            assert widget.shown.seq == rec.at(**{{"ms": "time"}.get(clock, clock): at}).count
        lanes._handle_custom_msg(
            {"wish": {"at": middle.iteration, "clock": "iteration", "seconds": 0.01}}, []
        )
        shown = lanes.shown
        assert shown.iteration == middle.iteration and shown.overlap is not None
        assert shown.overlap.seconds == 0.01 and shown.overlap.end_ms <= shown.t_ms
        lanes._handle_custom_msg({"wish": {"at": None, "seconds": "much"}}, [])
        assert lanes.shown.seq == len(rec)  # what makes no sense brings the present back


def test_what_cannot_be_shown_is_refused(engine: Engine) -> None:
    rec = engine.recording()
    with pytest.raises(NotFound, match="no request 'nobody'"):
        Journey(rec, "nobody")
    with pytest.raises(BadRequest, match="cannot be looked at"):
        OverlapLanes(rec, seconds=-1)
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
        press = Pressed(widget)
        press(op="pause")
        thread = threading.Thread(target=engine.generate, args=("hello",), daemon=True)
        thread.start()
        status = press(op="wait", after=0, timeout_s=5)["answer"]["status"]
        assert status["parked"] and debugger.parked
        assert press(op="look", what=["pools"])["answer"]["view"]["pools"]["total"] == 512
        assert press(op="past", by=-1)["answer"]["count"] > 0
        assert "no such debugger command" in press(op="nonsense")["error"]
        press(op="resume")
        thread.join(20)
        assert not thread.is_alive()
        assert "text/html" in widget._repr_mimebundle_()[0]


class Pressed:
    """A stepper's buttons, pressed as the page does."""

    def __init__(self, widget: Stepper) -> None:
        self._widget, self._calls = widget, 0
        self._said: list[dict[str, Any]] = []
        widget.send = lambda content, buffers=None: self._said.append(content)

    def __call__(self, **body: object) -> dict[str, Any]:
        self._calls += 1
        call = self._calls
        self._widget._handle_custom_msg({"call": call, "body": body}, [])
        eventually(lambda: any(each["call"] == call for each in self._said))
        return next(each for each in self._said if each["call"] == call)


def test_one_request_is_stepped_and_limits_and_policy_change_at_a_stop(engine: Engine) -> None:
    with engine.debugger() as debugger, Stepper(debugger) as widget:
        press = Pressed(widget)
        press(op="pause")
        asked = {"max_new_tokens": 6}
        thread = threading.Thread(
            target=engine.generate, args=("hello", asked), kwargs={"rid": "mine"}, daemon=True
        )
        thread.start()
        for to, kind in (("prefill", "batch.planned"), ("first token", "tokens.sampled")):
            stop = press(op="step_to", rid="mine", to=to)["answer"]["status"]["stop_no"]
            status = press(op="wait", after=stop, timeout_s=10)["answer"]["status"]
            assert status["parked"] and debugger.where is not None and debugger.where.kind == kind
        assert "first token already" in press(op="step_to", rid="mine", to="first token")["error"]
        seen = press(op="look", what=["limits", "types", "tree"], rid="mine")["answer"]["view"]
        assert {"Req", "ReqState"} <= {each["type"] for each in seen["types"]}
        assert {"fcfs", "lpm"} <= set(seen["limits"]["policies"])
        press(op="set_limits", schedule_policy="lpm", max_running_requests=3, max_total_tokens=500)
        press(op="resume", to="iteration")
        press(op="wait", after=status["stop_no"], timeout_s=10)
        limits = press(op="look", what=["limits"])["answer"]["view"]["limits"]
        assert (limits["schedule_policy"], limits["max_running_requests"]) == ("lpm", 3)
        back = press(op="past", what="iteration", by=-1)["answer"]
        assert back["iteration"] < debugger.where.iteration and all(
            "token_ids" not in node for node in back["tree"]
        )
        press(op="step_to", rid="mine", to="finish")
        press(op="resume")
        thread.join(20)
        assert not thread.is_alive()


def test_importing_the_pictures_loads_no_widget_and_no_torch() -> None:
    code = "import sys, sgviz.viz; print(*({'anywidget', 'ipywidgets', 'matplotlib', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("kind", SHOWS)
def test_an_exported_notebook_shows_the_picture(kind: Any, engine: Engine) -> None:
    """nbconvert takes the widget only where the notebook keeps its state; else the picture beside it."""
    exporting = pytest.importorskip("nbconvert")
    with kind(engine.recording()) as widget:
        output = nbformat.v4.new_output("display_data", data=widget._repr_mimebundle_()[0])
    cell = nbformat.v4.new_code_cell("widget", outputs=[output])
    text, _ = exporting.HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert 'src="data:image/png;base64,' in text
