"""Pauses and other weights as callers see them: who waits, who ends, who is told what, and that nobody hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tm_rig import Rig, params, rig, run

from sgviz.errors import BadRequest, ClientDisconnected, Unavailable
from sgviz.events.schema import GenerationContinued, GenerationPaused, RequestDispatched
from sgviz.messages import FinishReason, GenerateReqInput
from sgviz.messages.flow import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    Load,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    ProfileReqOutput,
    StartProfileReqInput,
    StopProfileReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)

LENGTH = FinishReason(type="length", length=1)


def request(rid: str, **values: Any) -> GenerateReqInput:
    return GenerateReqInput(text="x", rid=rid, sampling_params=params(**values))


async def answer(r: Rig, obj: GenerateReqInput, is_disconnected: Any = None) -> Any:
    return [output async for output in r.manager.generate_request(obj, is_disconnected)][-1]


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[Rig]:
    """An engine that answers questions, and requests when the test says so."""
    async with rig(**options) as r:
        r.engine.auto = False
        yield r


async def ticks(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def question(r: Rig, kind: type) -> Any:
    """The newest message of that type, as soon as the engine has it."""
    await r.engine.until(lambda: any(isinstance(message, kind) for message in r.engine.received))
    found = next(message for message in reversed(r.engine.received) if isinstance(message, kind))
    r.engine.received.remove(found)
    return found


async def paused(r: Rig, mode: str) -> int:
    task = asyncio.create_task(r.manager.control.pause_generation(mode))  # type: ignore[arg-type]
    asked = await question(r, PauseGenerationReqInput)
    assert asked.mode == mode
    r.engine.outbox.send(PauseGenerationReqOutput(id=asked.id, success=True, message="", requests=2))
    return await task


async def continued(r: Rig) -> None:
    task = asyncio.create_task(r.manager.control.continue_generation())
    asked = await question(r, ContinueGenerationReqInput)
    r.engine.outbox.send(ControlReqOutput(id=asked.id, success=True, message=""))
    await task


async def live(r: Rig, rid: str) -> None:
    await r.engine.until(lambda: rid in r.engine.live)


def bodies(r: Rig, kind: type) -> list[Any]:
    return [event.body for event in r.ring.snapshot() if isinstance(event.body, kind)]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_new_requests_wait_and_those_under_way_do_not_end(mode: str) -> None:
    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            assert await paused(r, mode) == 2
            second = asyncio.create_task(answer(r, request("second")))
            await ticks()
            assert "second" in r.manager.rid_to_state and not first.done()
            assert [event.rid for event in bodies(r, RequestDispatched)] == ["first"]
            await continued(r)
            await live(r, "second")
            for rid in ("first", "second"):
                r.engine.token(rid, "a", LENGTH)
            assert [(await task)["text"] for task in (first, second)] == ["a", "a"]
            [begun], [ended] = bodies(r, GenerationPaused), bodies(r, GenerationContinued)
            assert (begun.mode, begun.requests, ended.mode) == (mode, 1, mode)

    run(body())


def test_abort_ends_what_is_under_way_and_is_done_when_that_has_ended() -> None:
    async def body() -> None:
        async with started() as r:
            tasks = [asyncio.create_task(answer(r, request(rid, n=n))) for rid, n in (("a", 1), ("b", 3))]
            await live(r, "a")
            assert await r.manager.control.pause_generation("abort") == 0
            outputs = [await task for task in tasks]
            flat = [outputs[0], *outputs[1]]
            assert [output["meta_info"]["finish_reason"]["type"] for output in flat] == ["abort"] * 4
            assert "generation is paused" in flat[0]["meta_info"]["finish_reason"]["message"]
            late = asyncio.create_task(answer(r, request("late")))
            await ticks()
            assert not late.done() and not r.engine.live
            await continued(r)
            await live(r, "late")
            r.engine.token("late", "z", LENGTH)
            assert (await late)["text"] == "z"

    run(body())


def test_a_request_that_waits_can_be_aborted_and_its_client_may_leave() -> None:
    async def body() -> None:
        async with started() as r:
            await paused(r, "in_place")
            waiting = asyncio.create_task(answer(r, request("waiting")))
            await ticks()
            r.manager.abort_request("waiting")
            assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"

            async def gone() -> bool:
                return True

            with pytest.raises(ClientDisconnected):
                await answer(r, request("left"), gone)
            assert not r.manager.rid_to_state and not bodies(r, RequestDispatched)

    run(body())


def test_a_server_that_stops_does_not_let_them_wait() -> None:
    async def body() -> None:
        async with started() as r:
            await paused(r, "in_place")
            waiting = asyncio.create_task(answer(r, request("waiting")))
            await ticks()
            r.manager.refuse_new("the server is shutting down")
            r.manager.control.release()
            with pytest.raises(Unavailable, match="shutting down"):
                await waiting
            assert await question(r, ContinueGenerationReqInput)

    run(body())


def test_other_weights_wait_for_those_under_way_and_let_new_ones_wait() -> None:
    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            control = r.manager.control
            update = asyncio.create_task(control.update_weights_from_disk("m2", weight_version="v2"))
            await ticks()
            second = asyncio.create_task(answer(r, request("second")))
            await ticks()
            assert not any(isinstance(m, UpdateWeightFromDiskReqInput) for m in r.engine.received)
            r.engine.token("first", "a", LENGTH)
            assert (await first)["meta_info"]["weight_version"] == "default"
            asked = await question(r, UpdateWeightFromDiskReqInput)
            assert (asked.model_path, asked.weight_version, asked.flush_cache) == ("m2", "v2", True)
            assert "second" not in r.engine.live
            r.engine.outbox.send(UpdateWeightFromDiskReqOutput(id=asked.id, success=True, message="done"))
            assert (await update).message == "done"
            await live(r, "second")
            r.engine.token("second", "b", LENGTH)
            assert (await second)["meta_info"]["weight_version"] == "v2"
            assert (control.weights.model_path, control.weights.version) == ("m2", "v2")
            assert [event.mode for event in bodies(r, GenerationPaused)] == ["weights"]

    run(body())


def test_a_change_in_the_middle_of_an_answer_is_told_with_its_place() -> None:
    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            await paused(r, "in_place")
            update = asyncio.create_task(r.manager.control.update_weights_from_disk("m", flush_cache=False))
            asked = await question(r, UpdateWeightFromDiskReqInput)
            assert asked.weight_version == "default"  # the name stays
            reply = UpdateWeightFromDiskReqOutput(
                id=asked.id, success=True, message="", progress={"first": 4, "?": 1}
            )
            r.engine.outbox.send(reply)
            await update
            await continued(r)
            r.engine.token("first", "abcdef", LENGTH)
            assert (await first)["meta_info"]["weight_version_changes"] == [[4, "default"]]

    run(body())


def test_what_the_scheduler_refuses_is_raised_and_nothing_changes() -> None:
    async def body() -> None:
        async with started() as r:
            update = asyncio.create_task(r.manager.control.update_weights_from_disk("m", weight_version="v2"))
            asked = await question(r, UpdateWeightFromDiskReqInput)
            r.engine.outbox.send(
                UpdateWeightFromDiskReqOutput(id=asked.id, success=False, message="no such model")
            )
            with pytest.raises(BadRequest, match="no such model"):
                await update
            assert r.manager.control.weights.version == "default"
            task = asyncio.create_task(answer(r, request("after")))
            await live(r, "after")
            r.engine.token("after", "b", LENGTH)
            await task

    run(body())


def test_a_pause_comes_through_while_other_weights_wait_for_a_long_request() -> None:
    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            update = asyncio.create_task(r.manager.control.update_weights_from_disk("m"))
            await ticks()
            await paused(r, "retract")
            asked = await question(r, UpdateWeightFromDiskReqInput)  # it stands still: nothing to wait for
            r.engine.outbox.send(UpdateWeightFromDiskReqOutput(id=asked.id, success=True, message=""))
            await update
            await continued(r)
            r.engine.token("first", "a", LENGTH)
            await first

    run(body())


@pytest.mark.parametrize(
    "ask",
    ["pause_generation", "continue_generation", "update_weights_from_disk", "start_profile", "stop_profile",
     "slow_down", "get_load"],
)  # fmt: skip
def test_a_scheduler_that_dies_meanwhile_is_an_error_at_once_and_later_too(ask: str) -> None:
    arguments = {"pause_generation": ["in_place"], "update_weights_from_disk": ["m"], "slow_down": [0.1]}.get(
        ask, []
    )

    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(getattr(r.manager.control, ask)(*arguments))
            await r.engine.until(lambda: bool(r.engine.received))
            r.manager.fail_all("the scheduler died (exit code -9)")
            for call in (first, getattr(r.manager.control, ask)(*arguments)):
                with pytest.raises(Unavailable, match="the scheduler died"):
                    await call

    run(body())


def test_a_death_ends_the_wait_for_aborted_requests() -> None:
    async def body() -> None:
        async with started() as r:
            r.engine._abort = lambda rid, why: None  # type: ignore[method-assign]
            task = asyncio.create_task(answer(r, request("a")))
            await live(r, "a")
            pausing = asyncio.create_task(r.manager.control.pause_generation("abort"))
            await ticks()
            assert not pausing.done()
            r.manager.fail_all("the scheduler died")
            with pytest.raises(Unavailable, match="died"):
                await pausing
            assert (await task)["meta_info"]["finish_reason"]["status_code"] == 503

    run(body())


def test_a_time_limit_stands_still_in_a_pause() -> None:
    async def body() -> None:
        async with started(request_timeout=0.2) as r:
            await paused(r, "in_place")
            task = asyncio.create_task(answer(r, request("a")))
            await asyncio.sleep(0.5)
            assert not task.done()
            await continued(r)
            await live(r, "a")
            r.engine.token("a", "x", LENGTH)
            assert (await task)["meta_info"]["finish_reason"]["type"] == "length"

    run(body())


def test_profiles_and_the_load_are_asked_for_as_they_were_wanted() -> None:
    async def body() -> None:
        async with started() as r:
            control = r.manager.control
            task = asyncio.create_task(control.start_profile("here", 3, ["CPU"], with_stack=True))
            asked = await question(r, StartProfileReqInput)
            assert (asked.output_dir, asked.num_steps, asked.activities, asked.with_stack) == (
                "here",
                3,
                ("CPU",),
                True,
            )
            r.engine.outbox.send(ProfileReqOutput(id=asked.id, success=True, message="", path="p"))
            assert await task == "p"
            task = asyncio.create_task(control.stop_profile())
            asked = await question(r, StopProfileReqInput)
            r.engine.outbox.send(ProfileReqOutput(id=asked.id, success=False, message="none under way"))
            with pytest.raises(BadRequest, match="none under way"):
                await task
            load = asyncio.create_task(control.get_load())
            asked = await question(r, GetLoadsReqInput)
            r.engine.outbox.send(GetLoadsReqOutput(id=asked.id, load=Load(num_running_reqs=7)))
            assert (await load).num_running_reqs == 7
            for bad in (control.start_profile(num_steps=0), control.pause_generation("stop")):  # type: ignore[arg-type]
                with pytest.raises(BadRequest, match=r"num_steps must be|mode must be one of"):
                    await bad

    run(body())
