"""Questions to the engine, its health, its death, and the end of service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tm_rig import params, rig, run

from sgviz.errors import Unavailable
from sgviz.messages import FinishReason, GenerateReqInput, GetInternalStateReqOutput, HealthCheckOutput

LENGTH = FinishReason(type="length", length=3)


def request(rid: str = "a", **values: Any) -> GenerateReqInput:
    return GenerateReqInput(text="x", rid=rid, sampling_params=params(**values))


def test_flush_and_internal_state_get_their_own_answers() -> None:
    async def body() -> None:
        async with rig() as r:
            flushed, state, again = await asyncio.gather(
                r.manager.flush_cache(), r.manager.get_internal_state(1), r.manager.flush_cache()
            )
            assert flushed.success and again.success
            assert flushed.id != again.id
            assert state.state == {"live": 0, "num_tokenizer_manager_reqs": 0, "parked": False}

    run(body())


def test_a_question_without_answer_times_out() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            with pytest.raises(Unavailable, match="GetInternalStateReq within"):
                await r.manager.get_internal_state(0.05)

    run(body())


def test_health_is_a_sign_of_every_stage_since_the_probe() -> None:
    async def body() -> None:
        async with rig() as r:
            before = r.manager.last_receive_tstamp
            assert await r.manager.health_generate(5) is None
            assert r.manager.last_receive_tstamp > before
            (probe,) = r.engine.requests
            assert probe.rid.startswith("HEALTH_CHECK_")
            assert (probe.input_ids, probe.sampling_params.max_new_tokens) == ([0], 1)
            assert probe.sampling_params.is_greedy
            r.engine.auto = False
            asking = asyncio.create_task(r.manager.health_generate(5))
            await r.dispatched(2)
            r.engine.outbox.send(HealthCheckOutput(rid="any"))
            r.engine.outbox.send(GetInternalStateReqOutput(id="any", state={}))
            assert await asking is None
            await r.empty()

    run(body())


def test_health_of_a_silent_engine() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            assert await r.manager.health_generate(0.05) == "scheduler"
            assert not r.manager.rid_to_state

    run(body())


@pytest.mark.parametrize(
    ("heard", "silent"),
    [
        ([HealthCheckOutput(rid="")], "detokenizer"),
        ([HealthCheckOutput(rid="", forward=False)], "detokenizer"),
        ([GetInternalStateReqOutput(id="", state={})], "worker"),
        ([HealthCheckOutput(rid="", forward=False), GetInternalStateReqOutput(id="", state={})], "worker"),
    ],
)
def test_the_stage_that_is_silent_is_named(heard: list[Any], silent: str) -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            asking = asyncio.create_task(r.manager.health_generate(0.3))
            await r.dispatched()
            for message in heard:
                r.engine.outbox.send(message)
            assert await asking == silent

    run(body())


def test_a_question_that_the_detokenizer_swallows_is_not_blamed_on_the_scheduler() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            asking = asyncio.create_task(r.manager.get_internal_state(0.3))
            await r.engine.until(lambda: bool(r.engine.received))
            r.engine.outbox.send(HealthCheckOutput(rid="", forward=False))
            with pytest.raises(Unavailable, match="the detokenizer did not pass on"):
                await asking

    run(body())


def test_a_dead_engine_fails_everybody_and_takes_nobody() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            tasks = [r.start(request("a")), r.start(request("b", n=2))]
            await r.dispatched(2)
            asking = asyncio.create_task(r.manager.get_internal_state(5))
            probing = asyncio.create_task(r.manager.health_generate(5))
            await r.dispatched(3)
            r.engine.token("a", "so far")
            await r.engine.until(lambda: True)
            r.manager.fail_all("the scheduler has died", 503)
            outs: list[Any] = await asyncio.gather(*tasks)
            reasons = [outs[0][0]["meta_info"]["finish_reason"]] + [
                out["meta_info"]["finish_reason"] for out in outs[1][0]
            ]
            assert len(reasons) == 3
            for reason in reasons:
                assert (reason["type"], reason["status_code"]) == ("abort", 503)
                assert reason["message"] == "the scheduler has died"
            with pytest.raises(Unavailable, match="has died"):
                await asking
            assert await probing == "engine"
            with pytest.raises(Unavailable, match="has died"):
                await r.all(request("c"))
            await r.empty()

    run(body())


def test_shutting_down_lets_running_requests_finish() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request())
            await r.dispatched()
            r.manager.refuse_new("the server is shutting down")
            with pytest.raises(Unavailable, match="shutting down"):
                await r.all(request("b"))
            assert not await r.manager.drained(0.05)
            draining = asyncio.create_task(r.manager.drained(5))
            r.engine.token("a", "done", LENGTH)
            assert await draining
            (out,) = await task
            assert isinstance(out, dict)
            assert out["text"] == "done"
            assert await r.manager.drained(0)

    run(body())


def test_closing_ends_those_who_wait() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request())
            await r.dispatched()
            await r.manager.close()
            (out,) = await task
            assert isinstance(out, dict)
            assert out["meta_info"]["finish_reason"]["status_code"] == 503
            await r.manager.close()

    run(body())


def test_a_message_that_cannot_be_read_is_not_silence() -> None:
    async def body() -> None:
        told: list[str] = []
        async with rig(on_failure=told.append) as r:
            r.engine.auto = False
            task = r.start(request())
            await r.dispatched()
            r.engine.outbox.send(r.engine.requests[0])  # not a message for this end
            (out,) = await task
            assert isinstance(out, dict)
            message = out["meta_info"]["finish_reason"]["message"]
            assert "receiving from the engine failed" in message and told == [message]
            with pytest.raises(Unavailable, match="receiving from the engine failed"):
                await r.all(request("b"))
        assert len(told) == 1  # an orderly end is no failure

    run(body())
