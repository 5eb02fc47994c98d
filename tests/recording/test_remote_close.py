"""Following a server ends at once, takes its connection along, and says when it cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import sgviz
from sgviz.engine import Engine


@pytest.mark.timeout(60)
def test_closing_does_not_wait_for_the_next_event() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=0) as engine:
        url = engine.serve(port=0).url
        engine.generate("hello", sampling_params={"max_new_tokens": 2})
        rec = sgviz.connect(url)
        assert rec.wait_for(engine.pipeline.ring.total)
        rec.close()
        followers = [thread for thread in threading.enumerate() if thread.name == "sgviz-remote"]
        assert followers == [] and rec.link._stream.closed
        rec.close()
        assert len(rec) > 0


@pytest.mark.timeout(60)
def test_a_stream_that_breaks_is_taken_up_again() -> None:
    from sgviz.recording.remote import _cut

    with (
        Engine("tiny-llama", device="mock", mock_step_ms=0) as engine,
        sgviz.connect(engine.serve(port=0).url) as rec,
    ):
        engine.generate("one", sampling_params={"max_new_tokens": 2})
        assert rec.wait_for(engine.pipeline.ring.total)
        _cut(rec.link._stream)
        engine.generate("two", sampling_params={"max_new_tokens": 2})
        assert rec.wait_for(engine.pipeline.ring.total) and rec.dropped == 0
        assert len(rec) == engine.pipeline.ring.total


SMALL: dict[str, Any] = {"device": "mock", "mock_step_ms": 0}


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


@pytest.mark.timeout(60)
def test_another_run_at_the_same_address_is_not_taken_for_the_same() -> None:
    from sgviz.viz.views import LiveViews, Wanted

    with Engine("tiny-llama", **SMALL) as engine:
        server = engine.serve(port=0)
        engine.generate("one", sampling_params={"max_new_tokens": 8})
        rec = sgviz.connect(server.url)
        assert (
            rec.wait_for(engine.pipeline.ring.total) and rec.fault == "" and repr(rec).endswith(" dropped>")
        )
        own = engine.recording().freeze()
        views = LiveViews(rec.sibling())
        assert views.refresh() and views.make(Wanted()).fault == ""
    eventually(lambda: "cannot follow" in rec.fault and rec.fault.endswith("; trying again"))
    assert views.refresh() and "cannot follow" in views.make(Wanted()).fault
    kept = len(rec)  # nobody is there to send more
    with Engine("tiny-llama", **SMALL) as engine:
        engine.generate(["two"] * 4, sampling_params={"max_new_tokens": 8})
        engine.serve(port=server.port)
        eventually(lambda: rec.fault.endswith("its new run; followed no longer"))
        assert len(rec) == kept and rec.rids == own.rids and "started anew" in repr(rec.freeze())
        assert views.refresh() and not views.refresh()
    rec.close()


@pytest.mark.timeout(60)
def test_the_same_run_at_another_server_goes_on_and_a_key_that_is_refused_ends_it() -> None:
    with Engine("tiny-llama", **SMALL) as engine:
        server = engine.serve(port=0)
        engine.generate("one", sampling_params={"max_new_tokens": 2})
        rec = sgviz.connect(server.url)
        assert rec.wait_for(engine.pipeline.ring.total)
        server.stop(0.0)
        eventually(lambda: rec.fault.endswith("trying again"))
        engine.generate("two", sampling_params={"max_new_tokens": 2})
        server = engine.serve(port=server.port)
        assert rec.wait_for(engine.pipeline.ring.total) and rec.fault == "" and rec.dropped == 0
    with Engine("tiny-llama", admin_api_key="sesame", **SMALL) as engine:
        engine.serve(port=server.port)
        eventually(lambda: "answered 401" in rec.fault and rec.fault.endswith("followed no longer"))
    rec.close()
