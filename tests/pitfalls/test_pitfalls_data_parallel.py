"""Several schedulers: an even spread from the first request on, and aborts that reach the one that has the request."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sgviz.engine import Engine
from sgviz.events.schema import DpChose

MOCK: dict[str, Any] = {"model": "tiny-llama", "device": "mock", "mock_step_ms": 2.0}
LONG = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("method", ["round_robin", "total_requests", "total_tokens"])
def test_a_burst_right_after_the_start_is_spread_evenly(method: str) -> None:
    """When a burst arrives right after start or ranks are tied, the result is an even spread.
    vllm-project/vllm#22910, vllm-project/vllm#47420
    """

    async def burst(engine: Engine) -> list[Any]:
        return await asyncio.gather(
            *[engine.async_generate("same", {"max_new_tokens": 2}) for _ in range(64)]
        )

    with Engine(**MOCK, dp_size=4, load_balance_method=method) as engine:
        outputs = asyncio.run(burst(engine))
        order = [e.body.rank for e in engine.pipeline.ring.snapshot() if isinstance(e.body, DpChose)]
    counts = Counter(output["meta_info"]["dp_rank"] for output in outputs)
    assert set(counts) == set(range(4))
    if method == "round_robin":
        assert set(counts.values()) == {16}
        assert order == [number % 4 for number in range(64)]  # strictly in turn, whoever was quick
    else:  # what a rank has done meanwhile counts, so it need not be exact
        assert max(counts.values()) <= 24


def test_an_abort_reaches_the_rank_that_has_the_request() -> None:
    """sgl-project/sglang#15617"""
    with ThreadPoolExecutor(4) as pool, Engine(**MOCK, dp_size=4) as engine:
        calls = [pool.submit(engine.generate, "go on", LONG, rid=f"r{n}", routed_dp_rank=n) for n in range(4)]
        while engine.internal_state()["num_running_reqs"] < 4:
            pass
        for number in (2, 0, 3, 1):
            engine.abort(f"r{number}")
            reason = calls[number].result()["meta_info"]["finish_reason"]
            assert reason["type"] == "abort"
            running = [rank["num_running_reqs"] for rank in engine.internal_state()["ranks"]]
            assert running[number] == 0
        assert engine.flush_cache() is True


def test_an_abort_reaches_a_request_wherever_it_is_on_its_way() -> None:
    """Aborted at once: in the controller's inbox, in that of a rank, in its queue, or running.
    sgl-project/sglang#15617
    """

    async def burst(engine: Engine) -> list[str]:
        asked = [asyncio.create_task(engine.async_generate("go on", LONG, rid=f"r{n}")) for n in range(48)]
        for number in range(48):
            await asyncio.sleep(0.001 * (number % 3))
            engine.abort(f"r{number}")
        async with asyncio.timeout(60):
            while under_way := [number for number, task in enumerate(asked) if not task.done()]:
                for number in under_way:  # of one that was not sent yet nobody knew
                    engine.abort(f"r{number}")
                await asyncio.sleep(0.01)
            outputs = await asyncio.gather(*asked)
        return [output["meta_info"]["finish_reason"]["type"] for output in outputs]

    with Engine(**MOCK, dp_size=4, max_running_requests=2) as engine:
        assert set(asyncio.run(burst(engine))) == {"abort"}
        state = engine.internal_state()
        assert [rank["num_live_reqs"] for rank in state["ranks"]] == [0] * 4
        assert (state["num_tokenizer_manager_reqs"], state["num_detokenizer_reqs"]) == (0, 0)
        assert engine.flush_cache() is True
