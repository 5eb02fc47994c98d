"""A name that is used again: an abort in the queue under it says nothing of the request that has it later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sgviz.engine import Engine
from sgviz.events.schema import RequestAborted, TokensSampled

PARAMS = {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True}


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_audit_knows_that_a_name_is_used_again() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=2.0, max_running_requests=1) as engine:

        def begin(rid: str) -> Future[Any]:
            call = engine.async_generate(input_ids=[5] * 20, sampling_params=PARAMS, rid=rid)
            return engine.pipeline.loop.submit(call)

        def told(kind: type) -> list[Any]:
            return [event.body for event in engine.pipeline.ring.snapshot() if isinstance(event.body, kind)]

        def runs(rid: str) -> bool:
            return any(rid in body.rids for body in told(TokensSampled))

        first = begin("first")
        until(lambda: runs("first"))
        waiting = begin("again")
        until(lambda: engine.internal_state()["num_live_reqs"] == 2)
        engine.abort("again")
        assert waiting.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
        engine.abort("first")
        first.result(20)
        running = begin("again")
        until(lambda: runs("again"))
        engine.abort("again")
        assert running.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
        where = [body.where for body in told(RequestAborted) if body.rid == "again"]
        assert [place for place in where if place != "tokenizer"] == ["waiting", "running"]
        report = engine.recording().audit()
        assert report.balanced and report.live == (), str(report)
