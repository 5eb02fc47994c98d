"""Metrics of pauses, streaming sessions and the functions behind endpoints."""

from __future__ import annotations

import json
import threading
import time
import urllib.request

from scrapes import families, sums

from sgviz.engine import Engine


def calls(url: str) -> float:
    """Of the function behind POST /generate."""
    family = families(url)["func_latency_seconds"]
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.endswith("_count") and sample.labels["name"] == "generate"
    )


def test_functions_pauses_and_streaming_sessions() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=1024) as engine:
        check(engine, engine.serve(port=0).url)


def check(engine: Engine, url: str) -> None:
    before = calls(url)
    session = engine.open_session(1000, streaming=True)
    waits = threading.Thread(target=engine.generate, args=("x", {"max_new_tokens": 400, "ignore_eos": True}))
    waits.start()
    deadline = time.monotonic() + 20
    while not engine.internal_state()["num_running_reqs"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.pause_generation("in_place")
    told = sums(url)
    assert told["num_paused_reqs", ""] == 1 and told["num_streaming_sessions", ""] == 1
    engine.continue_generation()
    engine.close_session(session)
    waits.join(30)
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}}).encode()
    asked = urllib.request.Request(url + "/generate", body, {"content-type": "application/json"})
    urllib.request.urlopen(asked, timeout=30).read()
    told = sums(url)
    assert told["num_paused_reqs", ""] == 0 and told["num_streaming_sessions", ""] == 0
    assert calls(url) == before + 1
