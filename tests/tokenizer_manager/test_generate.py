"""Whole requests: single, streamed, batches, fan-out; what is sent and what comes out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tm_rig import CODEC, LIMITS, params, rig, run

from sgviz.errors import BadRequest
from sgviz.events import schema
from sgviz.messages import BatchStrOutput, FinishReason, GenerateReqInput

LENGTH = FinishReason(type="length", length=3)


def test_a_single_request() -> None:
    async def body() -> None:
        async with rig() as r:
            out = await r.one(GenerateReqInput(text="hello", rid="a", sampling_params=params()))
            assert out["text"] == "abc"
            assert out["output_ids"] == CODEC.encode("abc")
            assert "index" not in out
            meta = out["meta_info"]
            assert meta["id"] == "a"
            assert meta["finish_reason"] == {"type": "length", "length": 3}
            counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "num_retractions")
            assert [meta[name] for name in counts] == [5, 3, 2, 1]
            (sent,) = r.engine.requests
            assert (sent.rid, sent.input_ids) == ("a", CODEC.encode("hello"))
            await r.empty()

    run(body())


def test_the_stages_add_up_to_the_whole() -> None:
    async def body() -> None:
        async with rig() as r:
            meta = (await r.one(GenerateReqInput(text="hello", sampling_params=params())))["meta_info"]
            stages = meta["time_stats"]
            assert sum(stages.values()) == pytest.approx(meta["e2e_latency"], rel=1e-9)
            assert list(stages) == [
                "convert", "tokenize", "api_server_dispatch", "to_scheduler", "request_process",
                "prefill_waiting", "prefill_forward", "decode", "output_stream", "detokenize",
                "to_tokenizer_manager",
            ]  # fmt: skip
            assert 0 < meta["first_token_latency"] <= meta["e2e_latency"]
            assert meta["request_received_ts"] <= meta["forward_entry_time"] <= meta["prefill_finished_time"]
            assert meta["request_finished_ts"] - meta["request_received_ts"] == pytest.approx(
                meta["e2e_latency"], abs=1e-5
            )
            assert meta["decode_throughput"] > 0
            assert (meta["weight_version"], meta["dp_rank"]) == ("default", 0)

    run(body())


def test_the_time_before_the_manager_counts() -> None:
    async def body() -> None:
        async with rig() as r:
            early = r.manager.last_receive_tstamp - 5_000_000_000
            out = await r.one(GenerateReqInput(text="a", sampling_params=params(), received_ns=early))
            assert out["meta_info"]["time_stats"]["convert"] >= 5
            assert out["meta_info"]["first_token_latency"] >= 5

    run(body())


def test_streamed_text_and_ids_are_cumulative() -> None:
    async def body() -> None:
        async with rig() as r:
            outs: list[Any] = await r.all(GenerateReqInput(text="hi", sampling_params=params(), stream=True))
            assert outs[-1]["text"] == "abc"
            assert outs[-1]["meta_info"]["finish_reason"]["type"] == "length"
            for out in outs:
                assert "abc".startswith(out["text"])
                assert out["output_ids"] == CODEC.encode(out["text"])
            assert all(out["meta_info"]["finish_reason"] is None for out in outs[:-1])
            await r.empty()

    run(body())


def test_outputs_that_pile_up_are_read_at_once() -> None:
    """A slow reader gets one item with everything, however many messages came."""

    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            stream = r.manager.generate_request(
                GenerateReqInput(text="hi", rid="a", sampling_params=params(max_new_tokens=9), stream=True)
            )
            first = asyncio.ensure_future(anext(stream))
            await r.dispatched()
            r.engine.token("a", "x")
            assert (await first)["text"] == "x"  # type: ignore[call-overload]
            for char in "yzw":
                r.engine.token("a", char)
            r.engine.token("a", "!", FinishReason(type="length", length=5))
            await r.empty()
            rest: list[Any] = [out async for out in stream]
            assert [out["text"] for out in rest] == ["xyzw!"]
            assert rest[0]["meta_info"]["completion_tokens"] == 5

    run(body())


def test_a_forced_message_does_not_end_an_unstreamed_request() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(GenerateReqInput(text="hi", rid="a", sampling_params=params()))
            await r.dispatched()
            r.engine.token("a", "so ")
            r.engine.token("a", "far", LENGTH)
            (out,) = await task
            assert isinstance(out, dict)
            assert out["text"] == "so far"

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_the_same_rid_may_come_again_as_soon_as_the_answer_is_there(n: int, stream: bool) -> None:
    async def body() -> None:
        async with rig() as r:
            obj = GenerateReqInput(text="hi", rid="same", sampling_params=params(n=n), stream=stream)
            ended = 0
            async for item in r.manager.generate_request(obj):
                outs = item if isinstance(item, list) else [item]
                ended += sum(out["meta_info"]["finish_reason"] is not None for out in outs)
                if ended == n:  # the first iterator is still open
                    again: list[Any] = await r.all(obj)
            assert len(again[0]) == n if n > 1 and not stream else again[-1]["text"] == "abc"
            await r.empty()

    run(body())


def test_a_live_rid_is_refused_and_the_first_request_is_not_disturbed() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(GenerateReqInput(text="hi", rid="a", sampling_params=params()))
            await r.dispatched()
            for rid, text in (("a", "x"), (["b", "a"], ["x", "y"])):
                with pytest.raises(BadRequest, match="'a' is already in use"):
                    await r.all(GenerateReqInput(text=text, rid=rid, sampling_params=params()))
            assert list(r.manager.rid_to_state) == ["a"]
            assert not r.engine.aborts
            r.engine.token("a", "ok", LENGTH)
            (out,) = await task
            assert isinstance(out, dict)
            assert out["text"] == "ok"

    run(body())


def test_a_batch_comes_as_one_list_in_order() -> None:
    async def body() -> None:
        async with rig() as r:
            each = [params(max_new_tokens=n) for n in (3, 1, 2)]
            outs = await r.many(GenerateReqInput(text=["x", "yy", "z"], rid="b", sampling_params=each))
            assert [out["text"] for out in outs] == ["abc", "a", "ab"]
            assert [out["index"] for out in outs] == [0, 1, 2]
            assert [out["meta_info"]["id"] for out in outs] == ["b_0", "b_1", "b_2"]
            assert [out["meta_info"]["prompt_tokens"] for out in outs] == [1, 2, 1]
            by_ids = await r.many(GenerateReqInput(input_ids=[[1, 2], [3]], sampling_params=params()))
            assert [out["text"] for out in by_ids] == ["abc", "abc"]
            await r.empty()

    run(body())


def test_a_streamed_batch_yields_what_comes_first() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            obj = GenerateReqInput(text=["x", "y"], rid=["a", "b"], sampling_params=params(), stream=True)
            task = r.start(obj)
            await r.dispatched(2)
            r.engine.token("b", "B", LENGTH)
            await asyncio.sleep(0.05)
            r.engine.token("a", "A", LENGTH)
            outs: list[Any] = await task
            assert [(out["index"], out["text"]) for out in outs] == [(1, "B"), (0, "A")]
            await r.empty()

    run(body())


def test_many_requests_in_one_message_are_all_woken() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            tasks = [
                r.start(GenerateReqInput(text="x", rid=f"r{i}", sampling_params=params())) for i in range(40)
            ]
            rids = await r.dispatched(40)
            rows = [r.engine.row(rid, rid, [1], LENGTH) for rid in rids]
            merged = {
                name: [entry for row in rows for entry in getattr(row, name)]
                for name in BatchStrOutput.__struct_fields__
                if name != "dp_rank"
            }
            r.engine.outbox.send(BatchStrOutput(**merged))
            outs: list[Any] = [await task for task in tasks]
            assert [out[0]["text"] for out in outs] == [f"r{i}" for i in range(40)]
            (received,) = r.bodies(schema.OutputReceived)
            assert sorted(received.rids) == sorted(rids)

    run(body())


def test_n_samples_share_one_warm_up_and_count_the_seed_on() -> None:
    async def body() -> None:
        async with rig() as r:
            obj = GenerateReqInput(
                text=["hello", "you"], rid="p", sampling_params=params(n=3, sampling_seed=40)
            )
            outs = await r.many(obj)
            assert [out["index"] for out in outs] == list(range(6))
            assert [out["text"] for out in outs] == ["abc"] * 6
            sent = r.engine.requests
            warm, copies = sent[:2], sent[2:]
            assert [m.sampling_params.max_new_tokens for m in warm] == [0, 0]
            assert [m.input_ids for m in warm] == [CODEC.encode("hello"), CODEC.encode("you")]
            assert [m.sampling_params.sampling_seed for m in copies] == [40, 41, 42] * 2
            assert [m.sampling_params.max_new_tokens for m in copies] == [3] * 6
            assert {m.sampling_params.n for m in sent} == {1}
            assert [m.input_ids for m in copies] == [CODEC.encode("hello")] * 3 + [CODEC.encode("you")] * 3
            assert len({m.rid for m in sent}) == 8
            assert "p_0" not in {m.rid for m in sent}
            assert all(
                m["meta_info"]["prompt_tokens"] == len(m_in.input_ids) for m, m_in in zip(outs, copies)
            )
            await r.empty()

    run(body())


def test_the_copies_wait_for_the_warm_up() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(GenerateReqInput(text="x", sampling_params=params(n=2), stream=True))
            (warm,) = await r.dispatched()
            await asyncio.sleep(0.02)
            assert len(r.engine.requests) == 1
            r.engine.auto = True
            r.engine.send(warm, "", [], FinishReason(type="length", length=0))
            outs: list[Any] = await task
            assert {out["index"] for out in outs} == {0, 1}
            last = {out["index"]: out["text"] for out in outs}
            assert last == {0: "abc", 1: "abc"}

    run(body())


def test_a_warm_up_that_the_engine_refuses_ends_every_sample() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(GenerateReqInput(text="x", sampling_params=params(n=2)))
            (warm,) = await r.dispatched()
            full = FinishReason(type="abort", message="the queue is full", status_code=503)
            r.engine.send(warm, "", [], full)
            (outs,) = await task
            assert [out["meta_info"]["finish_reason"]["status_code"] for out in outs] == [503, 503]
            assert len(r.engine.requests) == 1
            await r.empty()

    run(body())


def test_unlimited_means_to_the_end_of_the_context() -> None:
    async def body() -> None:
        async with rig() as r:
            for n in (1, 2):
                await r.all(GenerateReqInput(text="hello", sampling_params=params(max_new_tokens=None, n=n)))
            limits = [m.sampling_params.max_new_tokens for m in r.engine.requests]
            assert limits == [58, 0, 58, 58]
            assert LIMITS.max_req_len == 63

    run(body())


def test_no_new_tokens_at_all() -> None:
    async def body() -> None:
        async with rig() as r:
            out = await r.one(GenerateReqInput(text="hello", sampling_params=params(max_new_tokens=0)))
            assert (out["text"], out["output_ids"]) == ("", [])
            assert out["meta_info"]["finish_reason"]["type"] == "length"
            assert out["meta_info"]["first_token_latency"] is None

    run(body())


def test_logprobs_gather_over_messages() -> None:
    async def body() -> None:
        async with rig() as r:
            r.engine.auto = False
            task = r.start(
                GenerateReqInput(
                    text="x", rid="a", sampling_params=params(), return_logprob=True, top_logprobs_num=2,
                    return_text_in_logprobs=True,
                )
            )  # fmt: skip
            await r.dispatched()
            ids = CODEC.encode("hey")
            tops = [[(-0.1, ids[0]), (-2.0, ids[1])], [(-0.2, ids[1])], [(-0.3, ids[2])]]
            r.engine.token("a", "he", output_token_logprobs=[[-0.1, -0.2]], output_top_logprobs=[tops[:2]])
            r.engine.token("a", "y", LENGTH, output_token_logprobs=[[-0.3]], output_top_logprobs=[tops[2:]])
            (out,) = await task
            assert isinstance(out, dict)
            meta = out["meta_info"]
            assert meta["output_token_logprobs"] == [
                (-0.1, ids[0], "h"),
                (-0.2, ids[1], "e"),
                (-0.3, ids[2], "y"),
            ]
            assert meta["output_token_logprobs_length"] == 3
            assert meta["output_top_logprobs"][0] == [(-0.1, ids[0], "h"), (-2.0, ids[1], "e")]
            assert len(meta["output_top_logprobs"]) == 3
            assert "output_token_logprobs" not in (await _plain(r))["meta_info"]

    async def _plain(r: Any) -> Any:
        r.engine.auto = True
        return await r.one(GenerateReqInput(text="x", sampling_params=params()))

    run(body())


def test_long_texts_are_tokenized_like_short_ones() -> None:
    async def body() -> None:
        roomy = {"context_len": 200_000, "max_req_len": 199_999, "max_req_input_len": 199_000}
        async with rig(replace(LIMITS, **roomy, max_total_num_tokens=200_000)) as r:
            text = "lorem ipsum " * 6000
            await r.one(GenerateReqInput(text=text, sampling_params=params()))
            assert r.engine.requests[0].input_ids == CODEC.encode(text)

    run(body())


def test_the_events_of_a_request() -> None:
    async def body() -> None:
        async with rig() as r:
            await r.one(GenerateReqInput(text="hello", rid="a", sampling_params=params()))
            r.manager.response_sent("a", 200)
            bodies = [event.body for event in r.ring.snapshot()]
            assert bodies[0] == schema.RequestTokenized(rid="a", prompt_tokens=5)
            assert bodies[1] == schema.RequestDispatched(rid="a")
            assert sum(sum(b.tokens) for b in bodies if isinstance(b, schema.OutputReceived)) == 3
            finished = schema.RequestFinished(
                rid="a", reason="length", matched="", prompt_tokens=5, completion_tokens=3, cached_tokens=2
            )
            assert bodies[-2] == finished
            assert bodies[-1] == schema.ResponseFinished(rid="a", status=200)

    run(body())


def test_two_managers_live_side_by_side() -> None:
    async def body() -> None:
        async with rig() as one, rig() as two:
            obj = GenerateReqInput(text="x", rid="a", sampling_params=params())
            outs = await asyncio.gather(one.one(obj), two.one(obj))
            assert [out["text"] for out in outs] == ["abc", "abc"]

    run(body())
