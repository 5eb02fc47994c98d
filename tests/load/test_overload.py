"""Three times more than the server can do: the surplus is refused at once, the rest completes, nothing is left of it.

Every request is sent when it is due, whatever became of those before (an open loop), so nothing protects the server but
`max_queued_requests`.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest
from load_tools import Reply, open_files, post, processes_of, resident_mib, until_empty
from server_process import ServerProcess

RUNNING, QUEUED, TOKENS = 8, 16, 20
FLAGS = (
    "--device", "mock", "--mock-step-ms", "20", "--max-running-requests", str(RUNNING), "--max-queued-requests",
    str(QUEUED), "--event-capacity", "20000",
)  # fmt: skip
TIMES = 3.0
MEMORY_SHARE = 0.03
SLACK_MIB = 4.0  # of a process that is small, 3 % are a handful of pages


def body(number: int) -> dict:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": [16 + number % 290, 20, 21, 22], "sampling_params": params}


async def capacity(url: str, seconds: float) -> float:
    """Requests a second that the server answers when it always has enough to do."""
    done, until = 0, time.perf_counter() + seconds

    async def work(number: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            reply = await post(url, body(number))
            assert reply.status == 200
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(RUNNING + QUEUED // 2)))
    return done / (time.perf_counter() - start)


async def open_loop(url: str, rate: float, seconds: float) -> list[Reply]:
    """Requests at `rate` a second, evenly; all their replies."""
    start, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(post(url, body(number))))
    return await asyncio.gather(*tasks)


def check(replies: list[Reply]) -> tuple[list[Reply], list[Reply]]:
    """Admitted ones are complete, the others are refused in the one form; returns both."""
    admitted = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 503]
    assert len(admitted) + len(refused) == len(replies), {reply.status for reply in replies}
    for reply in admitted:
        meta = reply.body["meta_info"]
        assert meta["completion_tokens"] == TOKENS == len(reply.body["output_ids"])
        assert meta["finish_reason"] == {"type": "length", "length": TOKENS}
    for reply in refused:
        error = reply.body["error"]
        assert error["code"] == 503 and error["type"] == "ServiceUnavailableError"
        assert "queue is full" in error["message"], error
    return admitted, refused


def told(admitted: list[Reply], refused: list[Reply], rate: float) -> str:
    quick = sorted(reply.seconds for reply in refused)
    return (
        f"{rate:.0f} requests/s of {rate / TIMES:.0f} possible: {len(admitted)} admitted (median "
        f"{statistics.median(reply.seconds for reply in admitted):.3f} s), {len(refused)} refused in "
        f"{1e3 * statistics.median(quick):.1f} ms (median), {1e3 * quick[int(0.99 * len(quick))]:.1f} ms (p99)"
    )


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(8.0, marks=[pytest.mark.slow, pytest.mark.alone]),
        pytest.param(60.0, marks=pytest.mark.long),
    ],
)
def test_three_times_too_much_for_a_while(seconds: float) -> None:
    async def story(server: ServerProcess) -> None:
        url, processes = server.url, processes_of(server)
        rate = TIMES * await capacity(url, 2.0)
        check(await open_loop(url, rate, seconds / 4))  # warm-up: whatever grows once has grown
        await until_empty(url)
        memory, files = resident_mib(processes), open_files(processes)
        admitted, refused = check(await open_loop(url, rate, seconds))
        print(told(admitted, refused, rate))
        assert len(admitted) >= RUNNING and len(refused) >= len(admitted) / 2, (
            "it was far too much, and it worked on"
        )
        # a refusal does not wait for what it is refused for
        most_refusals = sorted(reply.seconds for reply in refused)[int(0.9 * len(refused))]
        assert most_refusals < statistics.median(reply.seconds for reply in admitted)
        await until_empty(url)
        after = resident_mib(processes)
        print({name: f"{memory[name]:.1f} -> {after[name]:.1f} MiB" for name in after})
        for name, had in memory.items():
            assert after[name] <= had + max(MEMORY_SHARE * had, SLACK_MIB), name
        assert all(now <= files[name] + 2 for name, now in open_files(processes).items()), (
            "no connection is left open"
        )
        normal = await asyncio.gather(*(post(url, body(number)) for number in range(RUNNING)))
        assert [reply.status for reply in normal] == [200] * RUNNING
        check(list(normal))

    with ServerProcess(*FLAGS) as server:
        asyncio.run(story(server))
        server.process.terminate()
        assert server.wait() == 0 and server.leftovers() == []
