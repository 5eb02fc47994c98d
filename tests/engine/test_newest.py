"""A slow reader of a stream gets the newest output of each answer, and everything that follows in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from sgviz.engine import Engine
from sgviz.engine.newest import Newest
from sgviz.errors import BadRequest

MANY = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}


def test_only_the_newest_of_each_answer_is_kept() -> None:
    wakes: list[int] = []
    items = Newest(lambda: wakes.append(1))
    for step in range(3):
        for index in range(2):
            items.put({"index": index, "step": step})
    items.put("an error")
    items.put("the end")
    assert len(wakes) == 8
    taken = [items.take() for _ in range(5)]
    assert taken == [{"index": 0, "step": 2}, {"index": 1, "step": 2}, "an error", "the end", None]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", max_total_tokens=4096) as running:
        yield running


def wait_for_end(engine: Engine) -> None:
    while engine.internal_state()["num_tokenizer_manager_reqs"]:
        time.sleep(0.002)


def test_a_reader_that_sleeps_finds_the_whole_answer_at_once(engine: Engine) -> None:
    whole = engine.generate("a long answer", MANY)
    parts = engine.stream_sync("a long answer", MANY)
    first = next(parts)
    wait_for_end(engine)
    rest = list(parts)
    assert len(rest) == 1 and rest[0]["output_ids"] == whole["output_ids"]
    assert rest[0]["output_ids"][: len(first["output_ids"])] == first["output_ids"]
    assert rest[0]["meta_info"]["finish_reason"]["type"] == "length"


def test_the_same_in_a_loop_of_its_own(engine: Engine) -> None:
    async def read() -> list[dict]:
        found = []
        async for part in engine.stream(["one", "two"], MANY):
            found.append(part)
            await asyncio.to_thread(wait_for_end, engine)
        return found

    found = asyncio.run(read())
    assert {part["index"]: len(part["output_ids"]) for part in found} == {0: 200, 1: 200}
    assert len(found) <= 4


def test_an_error_comes_after_the_outputs(engine: Engine) -> None:
    with pytest.raises(BadRequest):
        next(engine.stream_sync("", MANY))
