"""A client that leaves, at every moment; afterwards nothing is left in the table."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tm_rig import Rig, params, rig, run

from sgviz.errors import BadRequest, ClientDisconnected
from sgviz.events import schema
from sgviz.messages import FinishReason, GenerateReqInput

LENGTH = FinishReason(type="length", length=3)


def request(rid: Any = "a", *, stream: bool = False, **values: Any) -> GenerateReqInput:
    text = ["x"] * len(rid) if isinstance(rid, list) else "x"
    return GenerateReqInput(text=text, rid=rid, sampling_params=params(**values), stream=stream)


class Client:
    """Says when it has gone."""

    def __init__(self) -> None:
        self.gone = False
        self.asked = 0

    async def is_disconnected(self) -> bool:
        self.asked += 1
        return self.gone


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_departed_client_stops_all_its_work(stream: bool, n: int) -> None:
    run(_departed(stream, n))


async def _departed(stream: bool, n: int) -> None:
    async with rig() as r:
        r.engine.auto = False
        client, loop = Client(), asyncio.get_running_loop()
        task = r.start(request("p", n=n, stream=stream), client.is_disconnected)
        rids = await r.dispatched()
        if n > 1:
            r.engine.send(rids[0], "", [], FinishReason(type="length", length=0))
            rids = (await r.dispatched(1 + n))[1:]
        gone, client.gone = loop.time(), True
        await r.engine.until(lambda: len(r.engine.aborts) == n)
        assert loop.time() - gone < 0.5
        with pytest.raises(ClientDisconnected):
            await task
        assert sorted(m.rid for m in r.engine.aborts) == sorted(rids)
        await r.empty()
        assert {e.why for e in r.bodies(schema.RequestAborted)} == {"the client closed the connection"}


@pytest.mark.parametrize("reader_s", [0.0, 0.01], ids=["quick reader", "slow reader"])
def test_a_client_that_leaves_while_tokens_flow_is_noticed(reader_s: float) -> None:
    """Also when there is always something to read, so that nobody ever waits."""

    async def flow(r: Rig) -> None:
        while "a" in r.engine.live:
            r.engine.token("a", "x")
            await asyncio.sleep(0.003)

    async def read(r: Rig, client: Client) -> None:
        obj = request(stream=True, max_new_tokens=50)
        async for _ in r.manager.generate_request(obj, client.is_disconnected):
            await asyncio.sleep(reader_s)

    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            client = Client()
            reading = asyncio.create_task(read(r, client))
            await r.dispatched()
            flowing = asyncio.create_task(flow(r))
            client.gone = True
            with pytest.raises(ClientDisconnected):
                await asyncio.wait_for(reading, 2)
            await flowing
            await r.empty()

    run(body())


def test_a_client_that_leaves_during_the_warm_up_gets_no_copies_made() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            client = Client()
            task = r.start(request("p", n=2), client.is_disconnected)
            (warm,) = await r.dispatched()
            client.gone = True
            with pytest.raises(ClientDisconnected):
                await task
            await r.empty()
            assert [m.rid for m in r.engine.aborts] == [warm]
            assert len(r.engine.requests) == 1

    run(body())


def test_a_normal_end_triggers_no_abort() -> None:
    async def body() -> None:
        async with rig() as r:
            client = Client()
            for stream in (False, True):
                await r.all(request(stream=stream), client.is_disconnected)
                await r.all(request(n=2, stream=stream), client.is_disconnected)
            await r.manager.flush_cache()
            assert not r.engine.aborts
            await r.empty()

    run(body())


@pytest.mark.parametrize("how", ["close", "cancel", "raise"])
def test_leaving_the_iterator_aborts(how: str) -> None:
    async def consume(r: Rig) -> None:
        stream = r.manager.generate_request(request(stream=True))
        with contextlib.suppress(RuntimeError):
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    if how == "close":
                        break
                    if how == "raise":
                        raise RuntimeError("the caller's own fault")

    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = asyncio.create_task(consume(r))
            await r.dispatched()
            r.engine.token("a", "x")
            if how == "cancel":
                await asyncio.sleep(0.02)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await r.engine.until(lambda: bool(r.engine.aborts))
            await r.empty()
            assert [m.rid for m in r.engine.aborts] == ["a"]

    run(body())


def test_the_rid_of_a_left_request_is_taken_until_the_scheduler_is_done() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            abort, r.engine._abort = r.engine._abort, lambda rid, why: None  # type: ignore[method-assign]
            task = r.start(request())
            await r.dispatched()
            task.cancel()
            await r.engine.until(lambda: bool(r.engine.aborts))
            with pytest.raises(BadRequest, match="already in use"):
                await r.all(request())
            abort("a", "")
            await r.empty()

    run(body())
