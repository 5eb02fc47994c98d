"""Clients that leave, aborts, flushes: each ends what it names, once, and nothing is left in any component."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pitfall_tools import Served, opened, serving
from server_process import Background

from sgviz.engine import Mode
from sgviz.events.schema import BatchPlanned, PoolReturned, RequestAborted, RequestFinished, ResponseFinished

NATIVE = "/generate"
ENDLESS = {"max_new_tokens": 1400, "ignore_eos": True, "temperature": 0}
STEPS = 20  # forwards that may pass until the work for a departed client has stopped


@pytest.fixture
def slow() -> Iterator[Served]:
    """A pipeline whose forward takes 20 ms, with prompts cut into pieces of 16 tokens and two running slots."""
    with serving(
        device="mock",
        mock_step_ms=20.0,
        chunked_prefill_size=16,
        max_running_requests=2,
        max_total_tokens=4096,
    ) as served:
        yield served
        served.assert_empty()


def native(rid: str, prompt: list[int] | str = "x", **params: Any) -> dict[str, Any]:
    where = "text" if isinstance(prompt, str) else "input_ids"
    return {where: prompt, "rid": rid, "sampling_params": {**ENDLESS, **params}}


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
    ],
)
def test_a_client_that_leaves_stops_all_its_samples(
    slow: Served, path: str, more: dict, stream: bool
) -> None:
    """All samples stop within a few steps, and their KV comes back exactly once. sgl-project/sglang#36333,
    sgl-project/sglang#35255, vllm-project/vllm#32439
    """
    asked = {**more, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    with opened(slow.url, path, asked):
        slow.until(num_running_reqs=2)
    before = slow.state()["forward_ct"]
    slow.until_idle()
    assert slow.state()["forward_ct"] - before < STEPS
    returned = [len(body.slots) for body in slow.events_of(PoolReturned)]
    assert returned and slow.engine.recording().check() == []
    assert Counter(body.status for body in slow.events_of(ResponseFinished)).keys() == {499}


def test_a_normal_end_triggers_no_abort(server: Served) -> None:
    """The end of the answer closes the connection, which must not be taken for a departure.
    ROCm/ATOM#1562, sgl-project/sglang#36333
    """
    before = len(server.events_of(RequestAborted))
    for stream in (False, True):
        for path in ("/v1/completions", "/generate"):
            body = (
                {"prompt": "x"} if path != NATIVE else {"text": "x", "sampling_params": {"max_new_tokens": 5}}
            )
            with httpx.Client(base_url=server.url) as client:
                assert client.post(path, json={**body, "stream": stream}).status_code == 200
    server.until_idle()
    assert len(server.events_of(RequestAborted)) == before


# ---------------------------------------------------------------- aborts


@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_request_that_is_aborted_is_answered_at_once_and_never_prefilled(
    slow: Served, stream: bool
) -> None:
    """An immediate final reply without any prefill, and no effect on others. sgl-project/sglang#6855,
    sgl-project/sglang#6931
    """
    running = [
        Background(lambda i=i: slow.generate([i + 4] * 5, params={"max_new_tokens": 80})) for i in range(2)
    ]
    slow.until(num_running_reqs=2)
    waiting = Background(lambda: slow.post(NATIVE, {**native("waits"), "stream": stream}))
    slow.until(num_waiting_reqs=1)
    assert slow.post("/abort_request", {"rid": "waits"}).status_code == 200
    waiting.join(2)  # the running ones take longer
    assert waiting.error is None and slow.state()["num_running_reqs"] == 2
    last = waiting.result.text.replace("data: [DONE]", "").strip().splitlines()[-1].removeprefix("data: ")
    answer = json.loads(last)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and answer["output_ids"] == []
    for other in running:
        other.join(20)
        assert other.result["meta_info"]["completion_tokens"] == 80
    assert not any("waits" in body.rids for body in slow.events_of(BatchPlanned))
    assert [body.rid for body in slow.events_of(RequestFinished)].count("waits") == 1


def test_unknown_and_repeated_ids_are_harmless(slow: Served) -> None:
    """Also one that begins like another request's. sgl-project/sglang#6184, sgl-project/sglang#6931"""
    running = Background(lambda: slow.post(NATIVE, native("abc", max_new_tokens=60)))
    slow.until(num_running_reqs=1)
    for rid in ("unknown", "ab", "a", "abcd", "HEALTH_CHECK_1"):
        assert slow.post("/abort_request", {"rid": rid}).status_code == 200
    running.join(20)
    assert running.result.json()["meta_info"]["completion_tokens"] == 60
    again = Background(lambda: slow.post(NATIVE, native("abc")))
    slow.until(num_running_reqs=1)
    for _ in range(5):
        slow.post("/abort_request", {"rid": "abc"})
    again.join(5)
    assert again.result.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert slow.post("/abort_request", {"rid": "abc"}).status_code == 200
    assert slow.post("/abort_request", {}).status_code == 400


def test_all_requests_at_once(slow: Served) -> None:
    """abort_all ends running, chunked and waiting ones alike, each with one final reply."""
    prompts = [[i + 4] * (400 if i == 1 else 5) for i in range(6)]
    calls = [Background(lambda i=i: slow.post(NATIVE, native(f"r{i}", prompts[i]))) for i in range(6)]
    slow.until(num_live_reqs=6)
    slow.post("/abort_request", {"abort_all": True})
    for call in calls:
        call.join(5)
        assert call.result.json()["meta_info"]["finish_reason"]["type"] == "abort"
    finished = Counter(body.rid for body in slow.events_of(RequestFinished))
    assert finished == {f"r{i}": 1 for i in range(6)}


def test_an_abort_between_chunks_gives_everything_back(slow: Served) -> None:
    """One final reply, all pages back, a free chunk slot, and the right answer for the same prompt later.
    sgl-project/sglang#35255, sgl-project/sglang#36926
    """
    prompt = [number % 300 + 4 for number in range(600)]
    cut = Background(lambda: slow.post(NATIVE, native("cut", prompt)))
    begun = slow.until(num_chunked_reqs=1)["forward_ct"]
    slow.until(num_chunked_reqs=1, forward_ct=begun + 3)
    slow.post("/abort_request", {"rid": "cut"})
    cut.join(5)
    assert cut.result.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert cut.result.json()["output_ids"] == []
    slow.assert_empty()
    assert [body.rid for body in slow.events_of(RequestFinished)].count("cut") == 1
    assert len([body for body in slow.events_of(BatchPlanned) if "cut" in body.rids]) < 600 // 16
    again = slow.generate(prompt, params={"max_new_tokens": 5})
    slow.engine.flush_cache()
    fresh = slow.generate(prompt, params={"max_new_tokens": 5})
    assert again["output_ids"] == fresh["output_ids"] and fresh["meta_info"]["cached_tokens"] == 0


def test_a_flush_while_requests_hold_memory_is_a_clean_refusal(slow: Served) -> None:
    """A refusal with the reason, never a crash; and it works when they have ended. sgl-project/sglang#12099,
    sgl-project/sglang#30673
    """
    running = Background(lambda: slow.generate("abc", params={"max_new_tokens": 40}))
    slow.until(num_running_reqs=1)
    refused = slow.http.post("/flush_cache")
    assert refused.status_code == 400 and "1 run" in refused.json()["error"]["message"]
    assert slow.http.post("/flush_cache?timeout=20").status_code == 200
    running.join(5)
    assert running.result["meta_info"]["completion_tokens"] == 40
    assert slow.state()["evictable_tokens"] == 0


def test_a_retracted_or_finished_request_cannot_be_ended_twice(slow: Served) -> None:
    """An abort that races with the normal end: whichever comes second finds nothing. sgl-project/sglang#6184"""
    for tokens in range(1, 12):
        call = Background(lambda n=tokens: slow.post(NATIVE, native(f"race{n}", max_new_tokens=n)))
        time.sleep(0.02 * tokens)
        slow.post("/abort_request", {"rid": f"race{tokens}"})
        call.join(10)
        meta = call.result.json()["meta_info"]
        assert meta["finish_reason"]["type"] in ("abort", "length") and meta["completion_tokens"] <= tokens
    finished = Counter(body.rid for body in slow.events_of(RequestFinished))
    assert set(finished.values()) == {1}


# ---------------------------------------------------------------- many at once


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "loop"), [("threads", "overlap"), ("processes", "normal")])
def test_two_hundred_streams_of_which_a_fifth_hang_up(mode: Mode, loop: str) -> None:
    """Every other reply is right, and afterwards no component knows of any request: free + evictable == total,
    nothing protected. sgl-project/sglang#36333, vllm-project/vllm#32439, sgl-project/sglang#35255
    """
    settings = {"max_total_tokens": 2048, "max_running_requests": 48, "chunked_prefill_size": 128}
    with serving(mode=mode, event_loop=loop, **settings) as server:
        jobs = _jobs(random.Random(1))
        outs = [server.generate(prompt, params=params) for prompt, params in jobs]
        expected = [out["output_ids"] for out in outs]
        server.engine.flush_cache()
        leaving = set(random.Random(2).sample(range(len(jobs)), len(jobs) // 5))
        found = asyncio.run(_all(server.url, jobs, leaving))
        wrong = [i for i, ids in enumerate(found) if i not in leaving and ids != expected[i]]
        assert wrong == [] and sum(ids is None for ids in found) == len(leaving) == 40
        server.assert_empty()
        recording = server.engine.recording()
        assert recording.dropped == 0 and recording.check() == []
        finished = Counter(body.rid for body in server.events_of(RequestFinished))
        assert set(finished.values()) == {1} and len(finished) == 2 * len(jobs)
        assert server.generate(jobs[0][0], params=jobs[0][1])["output_ids"] == expected[0]


def _jobs(chance: random.Random) -> list[tuple[list[int], dict[str, Any]]]:
    """200 prompts, many with a common head, of 5 to 80 tokens, with answers of 8 to 40."""
    heads = [[chance.randrange(4, 300) for _ in range(40)] for _ in range(6)]
    jobs = []
    for _ in range(200):
        head = chance.choice(heads)[: chance.randrange(41)]
        tail = [chance.randrange(4, 300) for _ in range(chance.randrange(5, 40))]
        params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": chance.randrange(8, 40)}
        jobs.append((head + tail, params))
    return jobs


async def _all(url: str, jobs: list[Any], leaving: set[int]) -> list[list[int] | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        calls = [_one(client, *job, 1 + i % 7 if i in leaving else None) for i, job in enumerate(jobs)]
        return await asyncio.gather(*calls)


async def _one(
    client: httpx.AsyncClient, prompt: list[int], params: dict[str, Any], leave_after: int | None
) -> list[int] | None:
    """The ids of one stream; None if it was left after so many events."""
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    ids: list[int] = []
    async with client.stream("POST", NATIVE, json=body) as answer:
        assert answer.status_code == 200
        events = 0
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return ids
            if line.startswith("data: "):
                output = json.loads(line[6:])
                assert output["output_ids"][: len(ids)] == ids
                ids = output["output_ids"]
                events += 1
            if events == leave_after:
                return None
    raise AssertionError("the stream ended without [DONE]")
