"""What a worker's TokenizerManager does when the main process orders: holds, ends, names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tm_rig import Rig, params, rig, run

from sgviz.events import Event
from sgviz.events.schema import RequestDispatched, WeightsRenamed
from sgviz.messages import FinishReason, GenerateReqInput
from sgviz.messages.workers import (
    AbortBroadcastReq,
    HoldForWeightsReq,
    PauseContinueBroadcastReq,
    ReleaseAfterWeightsReq,
    WeightsNamedReq,
)
from sgviz.recording.decisions import decisions_table

LENGTH = FinishReason(type="length", length=3)


@asynccontextmanager
async def worker(**options: Any) -> AsyncIterator[Rig]:
    async with rig(**options) as r:
        r.engine.auto = False
        r.manager.start()
        yield r


def begin(r: Rig, rid: str, **values: Any) -> asyncio.Task[Any]:
    return r.start(GenerateReqInput(text="x", rid=rid, sampling_params=params(**values)))


async def live(r: Rig, *rids: str) -> None:
    await r.engine.until(lambda: set(rids) <= set(r.engine.live))


async def ticks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def sent(r: Rig) -> list[str]:
    return [body.rid for body in r.bodies(RequestDispatched)]


async def end(r: Rig, task: asyncio.Task[Any], rid: str) -> dict[str, Any]:
    r.engine.token(rid, "abc", LENGTH)
    (output,) = await task
    meta: dict[str, Any] = output["meta_info"]
    return meta


def test_a_pause_holds_new_requests_and_lets_the_others_be() -> None:
    async def body() -> None:
        async with worker() as r:
            first = begin(r, "first")
            await live(r, "first")
            for mode in ("in_place", "retract"):
                await r.manager.follower.do(PauseContinueBroadcastReq(id="1", mode=mode))  # type: ignore[arg-type]
            late = begin(r, "late")
            await ticks()
            assert sent(r) == ["first"] and not first.done() and not r.engine.aborts
            await r.manager.follower.do(PauseContinueBroadcastReq(id="2", mode=None))
            await live(r, "late")
            for task, rid in ((first, "first"), (late, "late")):
                assert (await end(r, task, rid))["finish_reason"]["type"] == "length"

    run(body())


def test_a_pause_that_aborts_is_done_when_nothing_is_left() -> None:
    async def body() -> None:
        async with worker() as r:
            tasks = [begin(r, "a"), begin(r, "b", n=2)]
            await r.engine.until(lambda: len(r.engine.requests) >= 2)
            await r.manager.follower.do(PauseContinueBroadcastReq(id="1", mode="abort"))
            assert not r.manager.rid_to_state
            for task in tasks:
                (output,) = await task
                outputs = output if isinstance(output, list) else [output]
                assert {each["meta_info"]["finish_reason"]["type"] for each in outputs} == {"abort"}

    run(body())


def test_a_hold_waits_for_those_under_way_and_ends_with_its_release() -> None:
    async def body() -> None:
        async with worker() as r:
            first = begin(r, "first")
            await live(r, "first")
            holds = [
                asyncio.create_task(r.manager.follower.do(HoldForWeightsReq(id=name))) for name in ("1", "2")
            ]
            late = begin(r, "late")
            await ticks()
            assert sent(r) == ["first"] and not any(hold.done() for hold in holds)
            await end(r, first, "first")
            await asyncio.gather(*holds)
            named = WeightsNamedReq(id="3", model_path="m2", weight_version="v2")
            await r.manager.follower.do(named)
            for hold in ("1", "2"):  # each hold has a release of its own
                assert sent(r) == ["first"]
                await r.manager.follower.do(ReleaseAfterWeightsReq(id="4", hold=hold))
            await live(r, "late")
            assert (await end(r, late, "late"))["weight_version"] == "v2"

    run(body())


def test_a_hold_may_end_what_is_under_way() -> None:
    async def body() -> None:
        async with worker() as r:
            first = begin(r, "first")
            await live(r, "first")
            await r.manager.follower.do(HoldForWeightsReq(id="1", abort_all="other weights"))
            (output,) = await first
            assert output["meta_info"]["finish_reason"]["message"] == "other weights"
            await r.manager.follower.do(ReleaseAfterWeightsReq(id="2", hold="1"))
            await r.manager.follower.do(ReleaseAfterWeightsReq(id="3", hold="never came"))

    run(body())


def test_a_release_lets_go_of_the_hold_that_was_entered_while_another_one_waits() -> None:
    """Or time would stand still for the request that the other waits for, and nobody would ever go on."""

    async def body() -> None:
        async with worker(request_timeout=0.2) as r:
            do = r.manager.follower.do
            hung = begin(r, "hung")
            await live(r, "hung")
            await do(PauseContinueBroadcastReq(id="1", mode="in_place"))
            await do(HoldForWeightsReq(id="a"))
            await do(PauseContinueBroadcastReq(id="2", mode=None))
            waiting = asyncio.create_task(do(HoldForWeightsReq(id="b")))
            await ticks()
            assert not waiting.done()
            await do(ReleaseAfterWeightsReq(id="3", hold="a"))
            (output,) = await hung
            assert output["meta_info"]["finish_reason"]["status_code"] == 503
            await waiting
            late = begin(r, "late")
            await ticks()
            assert sent(r) == ["hung"]
            await do(ReleaseAfterWeightsReq(id="4", hold="b"))
            await live(r, "late")
            await end(r, late, "late")

    run(body())


@pytest.mark.parametrize("early", [True, False])
def test_a_release_is_of_its_own_hold_and_may_come_before_that_is_entered(early: bool) -> None:
    async def body() -> None:
        async with worker() as r:
            ends: list[str] = []
            r.engine._abort = lambda rid, why: ends.append(rid)  # type: ignore[method-assign]
            do = r.manager.follower.do
            first = begin(r, "first")
            await live(r, "first")
            await do(PauseContinueBroadcastReq(id="1", mode="in_place"))
            await do(HoldForWeightsReq(id="a"))
            waiting = asyncio.create_task(do(HoldForWeightsReq(id="b", abort_all="other weights")))
            await r.engine.until(lambda: bool(ends))
            assert not waiting.done()  # in a pause, too, those that are ended are waited for
            await do(ReleaseAfterWeightsReq(id="2", hold="a"))
            if early:
                await do(ReleaseAfterWeightsReq(id="3", hold="b"))
            await end(r, first, "first")
            await waiting
            await do(PauseContinueBroadcastReq(id="4", mode=None))
            late = begin(r, "late")
            await ticks()
            if not early:
                assert sent(r) == ["first"]  # held still, though the other was released
                await do(ReleaseAfterWeightsReq(id="3", hold="b"))
            await live(r, "late")
            await end(r, late, "late")

    run(body())


def test_a_renaming_that_a_worker_tells_of_is_not_another_one() -> None:
    async def body() -> None:
        async with worker() as r:
            first = begin(r, "first")
            await live(r, "first")
            named = WeightsNamedReq(id="1", model_path="m", weight_version="v2", renamed=True)
            await r.manager.follower.do(named)
            [told] = r.bodies(WeightsRenamed)
            assert told.of_worker and told.progress == (("first", 0),)
            leader = WeightsRenamed(weight_version="v2", before="default")
            events = [
                Event(seq, seq + 1, name, 0, each)
                for seq, (name, each) in enumerate(
                    [("tokenizer_manager", leader), ("tokenizer_manager-1", told)]
                )
            ]
            table = decisions_table(events, 0)
            assert list(table.verdict) == ["weights renamed"] and list(table["count"]) == [1]
            await end(r, first, "first")

    run(body())


def test_an_abort_of_all_that_is_asked_for_is_done_when_all_have_ended() -> None:
    async def body() -> None:
        async with worker() as r:
            ends: list[str] = []
            r.engine._abort = lambda rid, why: ends.append(rid)  # type: ignore[method-assign]
            first = begin(r, "first")
            await live(r, "first")
            order = AbortBroadcastReq(id="1", abort_all=True, message="why")
            done = asyncio.create_task(r.manager.follower.do(order))
            await r.engine.until(lambda: bool(ends))
            await ticks()
            assert not done.done()
            r.engine.token("first", "", FinishReason(type="abort", message="why"))
            await done
            await first

    run(body())


def test_requests_across_a_change_know_how_far_they_were() -> None:
    async def body() -> None:
        async with worker() as r:
            first = begin(r, "first")
            await live(r, "first")
            await r.manager.follower.do(PauseContinueBroadcastReq(id="1", mode="in_place"))
            await r.manager.follower.do(HoldForWeightsReq(id="2"))
            progress = {"first": 2, "of another worker": 7}
            await r.manager.follower.do(
                WeightsNamedReq(id="3", model_path="m2", weight_version="v2", progress=progress)
            )
            assert r.manager.rid_to_state["first"].weight_changes == [(2, "v2")]
            await r.manager.follower.do(ReleaseAfterWeightsReq(id="4", hold="2"))
            await r.manager.follower.do(PauseContinueBroadcastReq(id="5", mode=None))
            await end(r, first, "first")

    run(body())


def test_aborts_by_name_end_only_what_is_here() -> None:
    async def body() -> None:
        async with worker() as r:
            tasks = {rid: begin(r, rid) for rid in ("a", "b")}
            await live(r, "a", "b")
            await r.manager.follower.do(AbortBroadcastReq(rid="elsewhere", message="why"))
            await r.manager.follower.do(AbortBroadcastReq(rid="a", message="why"))
            (output,) = await tasks["a"]
            assert output["meta_info"]["finish_reason"]["message"] == "why"
            assert [abort.rid for abort in r.engine.aborts] == ["a"]
            await r.manager.follower.do(AbortBroadcastReq(abort_all=True, message="all"))
            (output,) = await tasks["b"]
            assert output["meta_info"]["finish_reason"]["message"] == "all"

    run(body())
