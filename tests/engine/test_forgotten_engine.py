"""An engine to which nobody refers any more ends itself; one whose server is held does not."""

from __future__ import annotations

import gc
import threading
import time

import httpx2

import sgviz

WAIT_S = 20.0


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("sgviz")}


def wait_for_none(but: set[threading.Thread]) -> set[threading.Thread]:
    """Until only those of other engines are left."""
    deadline = time.monotonic() + WAIT_S
    while engine_threads() - but and time.monotonic() < deadline:
        time.sleep(0.05)
    return engine_threads() - but


def test_a_forgotten_engine_ends_itself() -> None:
    before = engine_threads()
    engine = sgviz.Engine(device="mock")
    recording = engine.recording()
    rid = engine.generate("hello", {"max_new_tokens": 3})["meta_info"]["id"]
    assert engine_threads() - before
    del engine
    gc.collect()
    assert wait_for_none(before) == set()
    assert recording.rids == [rid]  # what was recorded stays


def test_a_server_keeps_its_engine() -> None:
    before = engine_threads()
    server = sgviz.Engine(device="mock").serve(port=0)
    gc.collect()
    answer = httpx2.post(
        f"{server.url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}
    )
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["completion_tokens"] == 2
    del server
    gc.collect()
    assert wait_for_none(before) == set()
