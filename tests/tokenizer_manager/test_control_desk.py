"""What the desk does where not all goes as asked: who ends first, time that runs on, pauses that come to nothing."""

from __future__ import annotations

import asyncio

import pytest
from test_flow import LENGTH, answer, bodies, continued, live, paused, question, request, started, ticks
from tm_rig import Rig, run

from sgviz.errors import BadRequest, Unavailable
from sgviz.events.schema import GenerationPaused, RequestDispatched, WeightsRenamed
from sgviz.messages import FinishReason
from sgviz.messages.flow import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from sgviz.messages.workers import AckedOrder
from sgviz.tokenizer_manager.crew import NoCrew


@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
def test_weights_that_end_all_requests_are_asked_for_when_all_have_ended(mode: str | None) -> None:
    async def body() -> None:
        async with started() as r:
            ends: list[str] = []
            r.engine._abort = lambda rid, why: ends.append(rid)  # type: ignore[method-assign]
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            if mode is not None:
                await paused(r, mode)
            control = r.manager.control
            update = asyncio.create_task(control.update_weights_from_disk("m", abort_all_requests=True))
            await r.engine.until(lambda: bool(ends))
            await ticks()
            assert not any(isinstance(m, UpdateWeightFromDiskReqInput) for m in r.engine.received)
            r.engine.send("first", "", [], FinishReason(type="abort", message="gone"))
            asked = await question(r, UpdateWeightFromDiskReqInput)
            r.engine.outbox.send(UpdateWeightFromDiskReqOutput(id=asked.id, success=True, message=""))
            await update
            meta = (await first)["meta_info"]
            assert meta["finish_reason"]["type"] == "abort" and "weight_version_changes" not in meta

    run(body())


def test_a_time_limit_goes_on_while_other_weights_wait_and_stands_still_while_they_are_loaded() -> None:
    """One that never ends would hold up the weights, and all that come, for ever."""

    async def body() -> None:
        async with started(request_timeout=0.2) as r:
            hung = asyncio.create_task(answer(r, request("hung")))
            await live(r, "hung")
            update = asyncio.create_task(r.manager.control.update_weights_from_disk("m"))
            asked = await question(r, UpdateWeightFromDiskReqInput)
            assert (await hung)["meta_info"]["finish_reason"]["status_code"] == 503
            late = asyncio.create_task(answer(r, request("late")))
            await asyncio.sleep(0.5)
            assert not late.done()
            r.engine.outbox.send(UpdateWeightFromDiskReqOutput(id=asked.id, success=True, message=""))
            await update
            await live(r, "late")
            r.engine.token("late", "x", LENGTH)
            assert (await late)["meta_info"]["finish_reason"]["type"] == "length"

    run(body())


def test_another_name_of_the_weights_is_told_with_its_place() -> None:
    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            r.engine.token("first", "a")
            r.engine.token("first", "b")
            while r.manager.rid_to_state["first"].completion_tokens < 2:
                await asyncio.sleep(0)
            await r.manager.control.update_weight_version("v2", abort_all_requests=False)
            r.engine.token("first", "c", LENGTH)
            meta = (await first)["meta_info"]
            assert (meta["weight_version"], meta["weight_version_changes"]) == ("v2", [[2, "v2"]])
            told = WeightsRenamed(weight_version="v2", before="default", progress=(("first", 2),))
            assert bodies(r, WeightsRenamed) == [told]

    run(body())


def test_another_name_ends_what_is_under_way_first_unless_told_not_to() -> None:
    async def body() -> None:
        async with started() as r:
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            await r.manager.control.update_weight_version("v2")
            meta = (await first)["meta_info"]
            assert meta["finish_reason"]["type"] == "abort" and "weight_version_changes" not in meta
            assert bodies(r, WeightsRenamed) == [WeightsRenamed(weight_version="v2", before="default")]

    run(body())


@pytest.mark.parametrize("before", [None, "in_place"])
def test_a_pause_that_is_not_answered_in_time_leaves_nothing_paused_that_was_not(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with started() as r:
            control = r.manager.control
            if before is not None:
                await paused(r, before)
            monkeypatch.setattr("sgviz.tokenizer_manager.control_desk.ANSWER_TIMEOUT_S", 0.1)
            with pytest.raises(Unavailable, match="did not answer") as caught:
                await control.pause_generation("retract")
            assert ("nothing is paused" in caught.value.message) == (before is None)
            assert control.is_paused == (before is not None)
            if before is None:
                assert await question(r, ContinueGenerationReqInput)
                task = asyncio.create_task(answer(r, request("after")))
                await live(r, "after")
                r.engine.token("after", "b", LENGTH)
                await task

    run(body())


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_that_comes_while_another_is_being_ended_holds(mode: PauseMode) -> None:
    async def body() -> None:
        async with started() as r:
            control = r.manager.control
            await paused(r, "in_place")
            continuing = asyncio.create_task(control.continue_generation())
            asked = await question(r, ContinueGenerationReqInput)
            pausing = asyncio.create_task(control.pause_generation(mode))
            await ticks()
            r.engine.outbox.send(ControlReqOutput(id=asked.id, success=True, message=""))
            await continuing
            if mode != "abort":
                asked = await question(r, PauseGenerationReqInput)
                r.engine.outbox.send(
                    PauseGenerationReqOutput(id=asked.id, success=True, message="", requests=0)
                )
            assert await pausing == 0
            assert control.is_paused and bodies(r, GenerationPaused)[-1].mode == mode
            late = asyncio.create_task(answer(r, request("late")))
            await ticks()
            assert not bodies(r, RequestDispatched)
            await continued(r)
            await live(r, "late")
            r.engine.token("late", "x", LENGTH)
            await late

    run(body())


class Wedged(NoCrew):
    """Workers of which one does nothing that it is told."""

    async def ask(self, order: AckedOrder, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.Event().wait()
        except TimeoutError:
            raise Unavailable(f"http-2 did not answer {type(order).__name__}") from None


def test_a_worker_that_does_nothing_keeps_nobody_from_pausing_continuing_and_naming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with started() as r:
            control = r.manager.control
            monkeypatch.setattr("sgviz.tokenizer_manager.control_desk.ANSWER_TIMEOUT_S", 0.1)
            monkeypatch.setattr(control, "_crew", Wedged())
            endless = asyncio.create_task(control.update_weight_version("v2"))  # waits for its requests
            for _ in range(2):
                with pytest.raises(Unavailable, match=r"http-2 did not .*nothing is paused"):
                    await control.pause_generation("in_place")
                with pytest.raises(Unavailable, match="http-2 did not answer WeightsNamedReq"):
                    await control.update_weight_version("v3", abort_all_requests=False)
                asyncio.get_running_loop().call_later(0.02, _continue_answered, r)
                with pytest.raises(Unavailable, match="http-2 did not answer PauseContinue"):
                    await control.continue_generation()
            assert not control.is_paused and not endless.done()

    run(body())


def _continue_answered(r: Rig) -> None:
    for asked in [each for each in r.engine.received if isinstance(each, ContinueGenerationReqInput)]:
        r.engine.outbox.send(ControlReqOutput(id=asked.id, success=True, message=""))


def test_a_pause_with_abort_that_is_ended_before_all_have_is_not_called_done() -> None:
    async def body() -> None:
        async with started() as r:
            r.engine._abort = lambda rid, why: None  # type: ignore[method-assign]
            first = asyncio.create_task(answer(r, request("first")))
            await live(r, "first")
            pausing = asyncio.create_task(r.manager.control.pause_generation("abort"))
            await ticks()
            await continued(r)
            with pytest.raises(BadRequest, match="ended by continue_generation before"):
                await pausing
            r.engine.send("first", "", [], FinishReason(type="abort", message="gone"))
            await first

    run(body())
