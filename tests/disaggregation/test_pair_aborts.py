"""A thousand requests through two engines, every tenth aborted on one side or the other: nothing is left."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from sgviz.engine import Engine
from sgviz.errors import SgvizError

pytestmark = pytest.mark.slow

REQUESTS, AT_ONCE = 1000, 64
COMMON: dict[str, Any] = {"model": "tiny-llama", "device": "mock", "max_total_tokens": 2048}


class Crowd:
    """Asks both engines as the router does; `ok`, `aborted`, `failed` count what the decode side answered."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.engines = prefill, decode
        self.port = prefill.settings.disaggregation.disaggregation_bootstrap_port
        self.rng = random.Random(8)
        self.ok = self.aborted = self.failed = 0

    async def run(self) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*[self._one(number, self._call(number), gate) for number in range(REQUESTS)])

    def _call(self, number: int) -> dict[str, Any]:
        rng = self.rng
        ids = [
            *range(20, 20 + rng.choice([1, 16, 48])),
            *(rng.randrange(300) for _ in range(rng.randrange(1, 80))),
        ]
        params = {"max_new_tokens": rng.randrange(1, 24), "temperature": 0, "ignore_eos": True}
        return {
            "input_ids": ids, "sampling_params": params, "rid": f"r{number}",
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": number + 1,
        }  # fmt: skip

    async def _one(self, number: int, call: dict[str, Any], gate: asyncio.Semaphore) -> None:
        victim, side, delay = self.rng.random() < 0.1, self.rng.choice(self.engines), self.rng.random() / 20
        async with gate:
            both = [asyncio.ensure_future(engine.async_generate(**call)) for engine in self.engines]
            if victim:
                await asyncio.sleep(delay)
                side.abort(call["rid"])
            _, answer = await asyncio.gather(*both, return_exceptions=True)
        if isinstance(answer, SgvizError):
            assert victim and "abort" in answer.message, (number, answer)
            self.failed += 1
        elif answer["meta_info"]["finish_reason"]["type"] == "abort":
            assert victim, number
            self.aborted += 1
        else:
            assert len(answer["output_ids"]) == call["sampling_params"]["max_new_tokens"]
            self.ok += 1


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_thousand_requests_with_aborts_on_either_side(backend: str) -> None:
    common = {**COMMON, "disaggregation_transfer_backend": backend}
    with (
        Engine(
            **common, disaggregation_mode="prefill", disaggregation_bootstrap_port=0, chunked_prefill_size=64,
            page_size=16,
        ) as prefill,
        Engine(**common, disaggregation_mode="decode", page_size=4) as decode,
    ):  # fmt: skip
        crowd = Crowd(prefill, decode)
        asyncio.run(crowd.run())
        assert crowd.ok >= 0.8 * REQUESTS and crowd.aborted + crowd.failed >= 20
        for engine in crowd.engines:
            deadline = time.monotonic() + 30
            while engine.internal_state()["num_live_reqs"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert engine.flush_cache()
            state = engine.internal_state()
            assert state["available_tokens"] == state["max_total_num_tokens"]
            report = engine.recording().audit()
            assert report.balanced, str(report)
