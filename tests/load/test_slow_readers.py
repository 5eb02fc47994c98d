"""Clients that read one chunk a second: they hold up nobody, cost bounded memory, and get all their text in the end.

There is no rule by which a slow reader is cut: its request ends in the engine at its usual speed, and what it has not
read waits for it, at most one unsent piece of it beyond what sockets hold. What the others lose is measured by
`benchmarks/slow_readers.py`.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from load_tools import Reply, post, processes_of, resident_mib, until_empty
from server_process import ServerProcess
from slow_readers import SlowReader, beside, slow_body, until_made

pytestmark = pytest.mark.slow
READERS, SLOW_TOKENS, OTHERS = 50, 1200, 24
FLAGS = (
    "--device",
    "mock",
    "--mock-step-ms",
    "5",
    "--event-capacity",
    "20000",
    "--max-running-requests",
    "64",
)
MEMORY_MIB = 96.0


def other(number: int) -> dict:
    params = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    return {"input_ids": [100 + number] * 6, "sampling_params": params}


async def ask_all(url: str) -> list[Reply]:
    return await asyncio.gather(*(post(url, other(number)) for number in range(OTHERS)))


async def story(server: ServerProcess) -> None:
    url, processes = server.url, processes_of(server)
    alone = await ask_all(url)
    whole = await asyncio.gather(*(post(url, slow_body(number, SLOW_TOKENS)) for number in range(READERS)))
    # every piece has the text so far: together they are half of the last one's size times their number
    unread = sum(len(json.dumps(reply.body)) for reply in whole) / 2 * SLOW_TOKENS / 2**20
    assert unread > 2 * MEMORY_MIB, "else the bound below says nothing"
    before = resident_mib(processes)
    readers = [SlowReader(url, slow_body(number, SLOW_TOKENS)) for number in range(READERS)]
    async with beside(readers):
        await until_made(url)  # nobody waits in the engine for whoever reads slowly
        assert [reply.body["text"] for reply in await ask_all(url)] == [reply.body["text"] for reply in alone]
        await asyncio.sleep(3.0)
        assert [reply.body["text"] for reply in await ask_all(url)] == [reply.body["text"] for reply in alone]
        grown = sum(resident_mib(processes).values()) - sum(before.values())
    assert all(reader.status == 200 and 0 < reader.chunks < SLOW_TOKENS / 4 for reader in readers)
    last = [json.loads(await reader.read_rest()) for reader in readers]
    assert [output["text"] for output in last] == [reply.body["text"] for reply in whole]
    assert [output["output_ids"] for output in last] == [reply.body["output_ids"] for reply in whole]
    assert grown < MEMORY_MIB, f"{grown:.0f} MiB for {READERS} answers that wait"
    await until_empty(url)


def test_slow_readers_get_all_in_the_end_and_the_others_notice_nothing() -> None:
    with ServerProcess(*FLAGS) as server:
        asyncio.run(story(server))


def test_a_slow_reader_that_leaves_takes_everything_with_it() -> None:
    async def leave(server: ServerProcess) -> None:
        readers = [SlowReader(server.url, slow_body(number, 1500)) for number in range(10)]
        async with beside(readers):
            await asyncio.sleep(1.0)
        for reader in readers:
            await reader.close()
        await until_empty(server.url)

    with ServerProcess(*FLAGS) as server:
        asyncio.run(leave(server))
