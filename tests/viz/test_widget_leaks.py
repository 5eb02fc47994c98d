"""Ten thousand live updates of all widgets on a served engine under load, then close: everything is given back."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comm
import ipywidgets
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import sgviz
from sgviz.engine import Engine
from sgviz.experiment import LiveLoad
from sgviz.viz import Dashboard, Journey, KVMap, LoadPanel, OverlapLanes, RadixTree, Stepper
from sgviz.viz.views import LiveViews
from sgviz.viz.widgets import LiveWidget, SgvizWidget

UPDATES = 10_000
HELD = (SgvizWidget, LiveViews, LiveLoad, Figure)


def sockets() -> int:
    """Open sockets of this process."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # closed while it was listed
            continue
    return sum(link.startswith("socket:") for link in links)


def held() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, HELD)]


def census(known: list[object]) -> dict[str, Any]:
    """What there is; of objects those that are not among `known`."""
    kept = {id(each) for each in known}
    alive = [each for each in held() if id(each) not in kept]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "widgets": len(ipywidgets.widgets.widget._instances),
        "comms": len(comm.get_comm_manager().comms),
        "figures": len(pyplot.get_fignums()),
        "objects": sorted(type(each).__name__ for each in alive),
        "sockets": sockets(),
    }


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def warm_up(url: str) -> None:
    """What is made once, at the first use, is no leak."""
    with sgviz.connect(url) as rec, LoadPanel(url) as panel:
        panel.start()
        eventually(lambda: panel.counts.finished > 1 and rec.wait_for(10))


def use(engine: Engine, url: str) -> None:
    """Everything a notebook may have open, for ten thousand updates."""
    with (
        sgviz.connect(url) as rec,
        Dashboard(rec) as dashboard,
        KVMap(rec) as kv,
        RadixTree(rec, decode=engine.pipeline.tokenizer.decode) as tree,
        OverlapLanes(rec, seconds=0.2) as lanes,
        Journey(rec) as journey,
        LoadPanel(url, rate=8.0, prompt_tokens=24, output_tokens=8) as panel,
        engine.debugger() as debugger,
        Stepper(debugger) as stepper,
    ):
        panel.start()
        followers: list[LiveWidget] = [dashboard, kv, tree, lanes, journey]
        before = sum(widget.updates for widget in followers)
        number = 0
        while sum(widget.updates for widget in followers) - before < UPDATES:
            followers[number % len(followers)]._update(force=True)
            number += 1
            if number % 500 == 0:
                panel.rate = 8.0 + number % 3
        assert all(widget.updates >= UPDATES / 6 for widget in followers)
        eventually(lambda: dashboard.shown.seq > 100 and panel.counts.finished > 5)
        for widget in (*followers, panel, stepper):
            assert widget._repr_mimebundle_() is not None
        assert all(len(widget.view) < 500_000 for widget in followers)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="sockets are counted through /proc")
def test_ten_thousand_updates_leave_nothing_behind() -> None:
    settings: dict[str, Any] = {"device": "mock", "mock_step_ms": 4, "max_total_tokens": 1024}
    with Engine("tiny-llama", enable_debugger=True, **settings) as engine:
        url = engine.serve(port=0).url
        warm_up(url)
        eventually(lambda: engine.internal_state()["num_running_reqs"] == 0)
        time.sleep(0.5)
        known = held()  # of other tests' engines
        before = census(known)
        assert before["objects"] == []
        use(engine, url)
        eventually(lambda: engine.internal_state()["num_running_reqs"] == 0)
        eventually(lambda: census(known) == before)
