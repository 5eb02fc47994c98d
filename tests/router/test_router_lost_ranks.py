"""A router and what its servers lost: ranks of a prefill server, and whole servers, told once."""

from __future__ import annotations

import asyncio

import pytest
from upstreams import rig


def test_no_room_leads_to_a_rank_that_is_lost() -> None:
    """Of a prefill server that spreads requests by their room: also of one whose loss nobody told yet."""

    async def run() -> None:
        async with rig(health_interval=60.0) as it:
            (prefill,) = it.prefill
            prefill.lost_ranks = (0, 1, 3)  # since the router looked
            it.decode[0].hold = asyncio.Event()  # until it is told to abort
            batch = await it.post(text=["a"] * 20)
            assert batch.status_code == 200 and it.router.router.counts.retries == 1
            assert {room % 4 for room in prefill.asked[-1]["bootstrap_room"]} == {2}
            prefill.asked.clear()
            assert {(await it.post()).status_code for _ in range(8)} == {200} and len(prefill.asked) == 8

    asyncio.run(run())


def test_of_requests_that_fail_at_once_the_first_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with rig(health_interval=60.0) as it:
            watch, server = it.router.router.watch, it.router.router.watch.decode[0]
            await asyncio.gather(*[watch.suspect(server, f"request {number} broke") for number in range(3)])
            assert server.healthy and server.failed == 3

    asyncio.run(run())
    lost = [record.message for record in caplog.records if "gets no requests" in record.message]
    assert len(lost) == 1 and lost[0].endswith("request 0 broke")
