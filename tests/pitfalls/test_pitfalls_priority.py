"""A higher priority waits: it runs before all lower ones, and who had to make way answers as if it had not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pitfall_tools import PATIENCE_S, Served, folded, serving
from workloads import Answer, answer_of, assert_books_balance, assert_same, make_engine, run, workload

from sgviz.events.schema import BatchPlanned, Event, QueueEntered, RequestRetracted
from sgviz.recording import Cause

pytestmark = pytest.mark.slow
LONG = {"max_new_tokens": 150, "min_new_tokens": 150, "ignore_eos": True}
PRESSED = {"max_running_requests": 2, "enable_priority_scheduling": True, "mock_step_ms": 0.0}


def requests(seed: int) -> tuple[list[list[int]], list[dict]]:
    prompts, params = workload(seed, 4, longest=12)
    return prompts, [{**param, **LONG} for param in params]


@pytest.fixture(scope="module")
def reference() -> list[Answer]:
    with make_engine() as engine:
        return run(engine, *requests(5))


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("page_size", [1, 8])
def test_the_higher_one_runs_before_all_lower_ones_and_the_victim_resumes_correctly(
    loop: str, page_size: int, reference: list[Answer]
) -> None:
    """vllm-project/vllm#40004, vllm-project/vllm#54530, sgl-project/sglang#8746"""
    prompts, params = requests(5)
    begun = threading.Event()
    with make_engine(**PRESSED, page_size=page_size, event_loop=loop) as engine:
        engine.pipeline.ring.subscribe(lambda events: begun.set() if any(map(two_decode, events)) else None)
        with ThreadPoolExecutor(4) as pool:

            def ask(number: int, priority: int) -> dict:
                return engine.generate(
                    input_ids=prompts[number],
                    sampling_params=params[number],
                    return_logprob=True,
                    rid=f"r{number}",
                    priority=priority,
                )

            low = [pool.submit(ask, number, number) for number in range(3)]
            assert begun.wait(PATIENCE_S)
            high = pool.submit(ask, 3, 50).result()
            outs = [*(future.result() for future in low), high]
        events = engine.pipeline.ring.snapshot()
        assert_same([answer_of(out) for out in outs], reference)
        assert_books_balance(engine)
        (told,) = [e.body for e in events if isinstance(e.body, RequestRetracted)]
        assert told.preempted_by == "r3" and told.output_tokens > 0
        came = next(
            at for at, e in enumerate(events) if isinstance(e.body, QueueEntered) and e.body.rid == "r3"
        )
        taken = [
            e.body for e in events[came:] if isinstance(e.body, BatchPlanned) and e.body.mode == "extend"
        ]
        assert taken[0].rids == ("r3",)  # before the one that waited already, and before the victim
        explanation = engine.recording().explain(told.rid)
        part = next(part for part in explanation.parts if part.cause is Cause.PRIORITY)
        assert "r3" in part.blockers
        assert outs[int(told.rid[1:])]["meta_info"]["finish_reason"] == {"type": "length", "length": 150}


def two_decode(event: Event) -> bool:
    body = event.body
    return isinstance(body, BatchPlanned) and body.mode == "decode" and len(body.rids) == 2


def test_a_stream_that_made_way_repeats_nothing() -> None:
    """The same, as the client of a stream sees it, by chat and by completions."""
    body = {
        "prompt": [7 + i for i in range(12)],
        "model": "tiny-llama",
        "max_tokens": 150,
        "temperature": 0,
        "ignore_eos": True,
    }
    with serving(max_running_requests=1, enable_priority_scheduling=True) as served:
        calm = served.post("/v1/completions", body).json()["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(served.chunks, "/v1/completions", {**body, "priority": 1, "rid": "low"})
            served.until(num_running_reqs=1)
            high = served.chat("Quick!", max_tokens=4, extra_body={"priority": 99, "ignore_eos": True})
            choice = folded(stream.result())[0]
        assert high.choices[0].finish_reason == "length"
        assert choice.text == calm and choice.finishes == 1 and choice.after_finish == 0
        assert [told.rid for told in served.events_of(RequestRetracted) if told.preempted_by] == ["low"]
        served.assert_empty()


def test_a_priority_that_is_no_integer_is_a_bad_request(server: Served) -> None:
    for value in ("high", 1.5, 2**63):
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/v1/completions", {"model": "tiny-llama", "prompt": "a"}),
            ("/v1/chat/completions", {"model": "tiny-llama", "messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = server.post(path, {**body, "priority": value})
            assert answer.status_code == 400 and "priority" in answer.text, answer.text
