"""Every way a request ends before its time; afterwards nothing is left in the table."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tm_rig import params, rig, run

from sgviz.errors import BadRequest
from sgviz.events import schema
from sgviz.messages import AbortReq, FinishReason, GenerateReqInput

LENGTH = FinishReason(type="length", length=3)


def request(rid: Any = "a", *, stream: bool = False, **values: Any) -> GenerateReqInput:
    text = ["x"] * len(rid) if isinstance(rid, list) else "x"
    return GenerateReqInput(text=text, rid=rid, sampling_params=params(**values), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_abort_ends_the_answer_with_the_text_so_far(stream: bool) -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request(stream=stream))
            await r.dispatched()
            r.engine.token("a", "so far")
            r.manager.abort_request("a")
            outs: list[Any] = await task
            assert outs[-1]["text"] == "so far"
            reason = outs[-1]["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"]) == ("abort", None)
            await r.empty()

    run(body())


def test_abort_is_exact_and_sent_once() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            tasks = [r.start(request(rid)) for rid in ("a", "ab", "a_0")]
            await r.dispatched(3)
            for rid in ("", "unknown", "a", "a"):
                r.manager.abort_request(rid)
            await tasks[0]
            r.manager.abort_request("a")
            await asyncio.sleep(0.02)
            assert [m.rid for m in r.engine.aborts] == ["a"]
            assert sorted(r.manager.rid_to_state) == ["a_0", "ab"]
            for rid in ("ab", "a_0"):
                r.engine.token(rid, "fine", LENGTH)
            outs: list[Any] = await asyncio.gather(*tasks[1:])
            assert [out[0]["text"] for out in outs] == ["fine", "fine"]
            await r.empty()
            assert [e.rid for e in r.bodies(schema.RequestAborted)] == ["a"]

    run(body())


def test_abort_in_the_queue_is_answered_at_once() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            r.engine.queued = {"a"}
            task = r.start(request())
            await r.dispatched()
            r.manager.abort_request("a")
            (out,) = await task
            assert isinstance(out, dict)
            assert out["text"] == ""
            assert out["meta_info"]["finish_reason"]["type"] == "abort"
            assert out["meta_info"]["prompt_tokens"] == 1
            await r.empty()

    run(body())


def test_a_refusal_by_the_scheduler_carries_its_status() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request())
            await r.dispatched()
            full = FinishReason(
                type="abort", message="full", status_code=503, err_type="ServiceUnavailableError"
            )
            r.engine.outbox.send(AbortReq(rid="a", finished_reason=full))
            (out,) = await task
            assert isinstance(out, dict)
            assert out["meta_info"]["finish_reason"] == full.as_dict()
            await r.empty()
            assert not r.engine.aborts

    run(body())


def test_whichever_end_comes_second_is_ignored() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request())
            await r.dispatched()
            second = r.engine.row("a", "late", [1], None)
            r.engine.token("a", "end", LENGTH)
            r.engine.outbox.send(AbortReq(rid="a"))
            r.engine.outbox.send(second)
            (out,) = await task
            assert isinstance(out, dict)
            assert out["text"] == "end"
            assert (await r.manager.flush_cache()).success  # the loop is alive behind them
            await r.empty()

    run(body())


def test_the_name_of_a_fan_out_stands_for_its_children() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            fan = r.start(request("p", n=2, stream=True))
            (warm,) = await r.dispatched()
            with pytest.raises(BadRequest, match="'p' is already in use"):
                await r.all(request("p"))
            r.engine.send(warm, "", [], FinishReason(type="length", length=0))
            _, first, second = await r.dispatched(3)
            other = r.start(request("p2"))
            await r.dispatched(4)
            r.manager.abort_request("p")
            r.manager.abort_request("p")
            outs: list[Any] = await fan
            assert {(out["index"], out["meta_info"]["finish_reason"]["type"]) for out in outs} == {
                (0, "abort"), (1, "abort"),
            }  # fmt: skip
            assert [m.rid for m in r.engine.aborts] == [first, second]
            r.engine.token("p2", "fine", LENGTH)
            await other
            await r.empty()

    run(body())


def test_one_child_can_be_aborted_alone() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            batch = GenerateReqInput(text=["x", "y"], rid="b", sampling_params=params())
            task = r.start(batch)
            await r.dispatched(2)
            r.manager.abort_request("b_1")
            r.engine.token("b_0", "fine", LENGTH)
            (outs,) = await task
            assert [out["meta_info"]["finish_reason"]["type"] for out in outs] == ["length", "abort"]
            await r.empty()

    run(body())


def test_a_named_batch_is_aborted_as_a_whole() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(GenerateReqInput(text=["x", "y"], rid="b", sampling_params=params()))
            await r.dispatched(2)
            r.manager.abort_request("b")
            (outs,) = await task
            assert [out["meta_info"]["finish_reason"]["type"] for out in outs] == ["abort", "abort"]
            await r.empty()

    run(body())


def test_abort_during_the_warm_up_sends_no_copies() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request("p", n=3))
            (warm,) = await r.dispatched()
            # the abort crosses the warm-up's normal end
            r.engine._abort = lambda rid, why: None  # type: ignore[method-assign]
            r.manager.abort_request("p")
            r.engine.send(warm, "", [], FinishReason(type="length", length=0))
            (outs,) = await task
            assert [out["meta_info"]["finish_reason"]["type"] for out in outs] == ["abort"] * 3
            assert len(r.engine.requests) == 1
            await r.empty()

    run(body())


def test_abort_all_is_one_message() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            tasks = [r.start(request(rid)) for rid in ("a", "b", "c")]
            await r.dispatched(3)
            r.manager.abort_request(abort_all=True)
            r.manager.abort_request(abort_all=True)
            r.manager.abort_request("a")
            outs: list[Any] = await asyncio.gather(*tasks)
            assert {out[0]["meta_info"]["finish_reason"]["type"] for out in outs} == {"abort"}
            assert [m.abort_all for m in r.engine.aborts] == [True]
            await r.empty()

    run(body())


def test_a_refused_prompt_of_a_batch_leaves_nothing() -> None:
    async def body() -> None:
        async with rig() as r:
            texts = ["fine", "x" * 1000]
            for n in (1, 2):
                with pytest.raises(BadRequest, match="1000 tokens"):
                    await r.all(GenerateReqInput(text=texts, rid="b", sampling_params=params(n=n)))
            await r.manager.flush_cache()
            assert not r.engine.requests
            assert not r.engine.aborts
            await r.empty()

    run(body())


def test_a_fault_behind_the_scheduler_stops_the_scheduler_too() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(request())
            await r.dispatched()
            stale = r.engine.row("a", "stale", [1], None)
            broken = r.engine.row("a", "", [], None)
            broken.finished_reasons = [FinishReason(type="abort", message="no text", status_code=500)]
            r.engine.outbox.send(broken)
            (out,) = await task
            assert isinstance(out, dict)
            assert out["meta_info"]["finish_reason"]["status_code"] == 500
            await r.engine.until(lambda: bool(r.engine.aborts))
            # the same name again: what is still under way of the first does not reach the second
            again = r.start(request())
            await r.dispatched(2)
            r.engine.outbox.send(stale)
            r.engine.token("a", "new", LENGTH)
            (out,) = await again
            assert isinstance(out, dict)
            assert out["text"] == "new"
            await r.empty()

    run(body())


def test_a_row_that_does_not_fit_ends_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            tasks = [r.start(request(rid)) for rid in ("a", "b")]
            await r.dispatched(2)
            row = r.engine.row("a", "x", [1], None)
            row.completion_tokens = []
            r.engine.outbox.send(row)
            r.engine.token("b", "fine", LENGTH)
            outs: list[Any] = await asyncio.gather(*tasks)
            assert outs[0][0]["meta_info"]["finish_reason"]["status_code"] == 500
            assert outs[1][0]["text"] == "fine"
            await r.empty()

    run(body())
    assert "could not be handled" in caplog.text
