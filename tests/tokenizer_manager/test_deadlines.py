"""`request_timeout`: whoever takes too long ends with 503, in any state, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from tm_rig import params, rig, run

from sgviz.events.schema import RequestAborted, RequestFinished
from sgviz.messages import AbortReq, FinishReason, GenerateReqInput
from sgviz.messages.workers import GivenUp
from sgviz.tokenizer_manager import deadlines

WORDS = "took longer than 0.1 s (request_timeout)"


@pytest.fixture(autouse=True)
def last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LAST_WORD_S", 0.1)


def request(rid: str = "a", **values: Any) -> GenerateReqInput:
    return GenerateReqInput(text="x", rid=rid, sampling_params=params(), **values)


def is_late(output: Any) -> bool:
    reason = output["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503) and WORDS in reason["message"]
    return True


@pytest.mark.parametrize("queued", [False, True])
def test_the_engine_is_told_and_its_end_becomes_a_503(queued: bool) -> None:
    async def body() -> None:
        async with rig(request_timeout=0.1) as r:
            r.engine.auto = False
            r.engine.queued = {"a"} if queued else set()
            (output,) = await r.start(request())
            assert is_late(output) and [abort.rid for abort in r.engine.aborts] == ["a"]
            assert [event.where for event in r.bodies(RequestAborted)] == ["tokenizer"]
            assert len(r.bodies(RequestFinished)) == 1
            await r.empty()

    run(body())


def test_a_stream_ends_with_the_reason_behind_the_text_so_far() -> None:
    async def body() -> None:
        async with rig(request_timeout=0.1) as r:
            r.engine.auto = False
            task = r.start(request(stream=True))
            await r.dispatched()
            r.engine.token("a", "some")
            *_, last = await task
            assert isinstance(last, dict) and last["text"] == "some" and is_late(last)
            await r.empty()

    run(body())


def test_an_engine_that_says_nothing_does_not_hold_anybody() -> None:
    async def body() -> None:
        async with rig(request_timeout=0.1) as r:
            r.engine._react = lambda message: None  # type: ignore[method-assign]
            outputs = await asyncio.gather(*(r.start(request(str(n))) for n in range(5)))
            assert all(is_late(output) for (output,) in outputs)
            assert {abort.rid for abort in r.engine.aborts} == {"0", "1", "2", "3", "4"}
            await r.empty()

    run(body())


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_worker_tells_the_router_what_it_gives_up_and_only_that(is_worker: bool) -> None:
    async def body() -> None:
        async with rig(request_timeout=0.1, is_worker=is_worker) as r:
            r.engine._react = lambda message: None  # type: ignore[method-assign]
            (output,) = await r.start(request())
            assert is_late(output)
            [sent] = r.engine.requests
            r.manager.abort_request("a")
            await r.manager.health_generate(0.05)  # what comes after it
            await r.engine.until(lambda: len(r.engine.requests) > 1)
            told = [each for each in r.engine.received if isinstance(each, GivenUp)]
            assert told == ([GivenUp(rid="a", created=sent.time_stats.created)] if is_worker else [])

    run(body())


def test_an_end_that_comes_in_time_stays_what_it_is() -> None:
    async def body() -> None:
        async with rig(request_timeout=0.1) as r:
            r.engine._react = lambda message: r.engine.live.setdefault(message.rid, message)  # type: ignore
            again = r.start(request("b"))
            await r.engine.until(
                lambda: any(isinstance(m, AbortReq) and m.rid == "b" for m in r.engine.received)
            )
            r.engine.token("b", "whole", FinishReason(type="stop", matched=2))
            (output,) = await again
            assert isinstance(output, dict)
            assert output["meta_info"]["finish_reason"]["type"] == "stop" and output["text"] == "whole"

    run(body())


def test_time_stands_still_while_a_debugger_holds_the_scheduler() -> None:
    async def body() -> None:
        async with rig(request_timeout=0.1) as r:
            r.engine.auto = False
            r.manager._time.stand_still()
            task = r.start(request())
            await r.dispatched()
            await asyncio.wait((task,), timeout=0.5)
            assert not task.done() and not r.engine.aborts
            r.manager._time.go_on()
            (output,) = await task
            assert is_late(output)

    run(body())


def test_finished_requests_are_not_kept_until_their_time_is_up() -> None:
    async def body() -> None:
        async with rig(request_timeout=1000.0) as r:
            task = r.start(request())
            await asyncio.sleep(0)
            state = weakref.ref(r.manager.rid_to_state["a"])
            await task
            del task
            gc.collect()
            assert state() is None

    run(body())
