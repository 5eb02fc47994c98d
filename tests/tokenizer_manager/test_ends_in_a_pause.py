"""What ends while it waits out a pause is over: nothing is tokenized, sent or refused under its name afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_flow import answer, continued, paused, request, started
from tm_rig import LIMITS, Rig, params, run

from sgviz.errors import BadRequest
from sgviz.events.schema import RequestFinished, RequestRefused
from sgviz.messages import GenerateReqInput
from sgviz.recording.audit import audit


def after_their_end(r: Rig) -> list[tuple[str, str]]:
    """Kind and rid of the events that came behind a request's end."""
    ended: dict[str, None] = {}
    late = []
    for event in r.ring.snapshot():
        rid = getattr(event.body, "rid", None)
        if rid in ended:
            late.append((event.kind, rid))
        if isinstance(event.body, RequestFinished):
            ended[rid] = None
    return late


async def _all(r: Rig) -> None:
    r.manager.abort_request(abort_all=True)


async def _warm_up(r: Rig) -> None:
    r.manager.abort_request(next(rid for rid in r.manager.rid_to_state if "_warm_" in rid))


@pytest.mark.parametrize("end", [_all, _warm_up])
@pytest.mark.parametrize("prompts", ["x", ["x", "y"]])
def test_a_warm_up_that_was_aborted_is_not_tokenized(
    end: Callable[[Rig], Awaitable[None]], prompts: str | list[str]
) -> None:
    async def body() -> None:
        async with started() as r:
            await paused(r, "in_place")
            task = asyncio.create_task(
                answer(r, GenerateReqInput(text=prompts, rid="a", sampling_params=params(n=3)))
            )
            await asyncio.sleep(0)
            while not r.manager.rid_to_state:
                await asyncio.sleep(0)
            await end(r)
            r.engine.auto = True
            await continued(r)
            outs: list[Any] = await task
            ends = [out["meta_info"]["finish_reason"]["type"] for out in outs]
            assert ends[:3] == ["abort"] * 3 and len(ends) == (3 if prompts == "x" else 6)
            assert after_their_end(r) == []
            assert audit(r.ring.snapshot()).balanced
            await r.empty()

    run(body())


def test_one_of_a_batch_that_was_aborted_is_neither_tokenized_nor_refused() -> None:
    async def body() -> None:
        async with started() as r:
            await paused(r, "in_place")
            wrong = GenerateReqInput(
                text=["x", "y" * LIMITS.context_len], rid=["a", "b"], sampling_params=params()
            )
            task = asyncio.create_task(answer(r, wrong))
            while not r.manager.rid_to_state:
                await asyncio.sleep(0)
            r.manager.abort_request("a")
            await continued(r)
            with pytest.raises(BadRequest):
                await task
            assert [each.rid for each in r.bodies(RequestRefused)] == ["b"]
            assert [late for late in after_their_end(r) if late[1] == "a"] == []
            await r.empty()

    run(body())


def test_a_name_of_one_that_ended_so_is_free_again() -> None:
    async def body() -> None:
        async with started() as r:
            await paused(r, "in_place")
            task = asyncio.create_task(answer(r, request("a")))
            while not r.manager.rid_to_state:
                await asyncio.sleep(0)
            r.manager.abort_request("a")
            r.engine.auto = True
            await continued(r)
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await answer(r, request("a")))["meta_info"]["finish_reason"]["type"] != "abort"
            assert audit(r.ring.snapshot()).balanced

    run(body())
