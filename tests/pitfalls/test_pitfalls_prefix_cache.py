"""Shared prefixes and KV memory: hits change no answer, nothing in use is evicted, and the books balance."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from workloads import Answer, assert_books_balance, assert_same, bodies, make_engine, run, workload

from sgviz.engine import Engine
from sgviz.events.schema import (
    BatchPlanned,
    LoopIdle,
    PoolReturned,
    PrefixMatched,
    RequestRetracted,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)

pytestmark = pytest.mark.slow
PAGES = (1, 4, 16)


@pytest.fixture(scope="module")
def reference() -> list[Answer]:
    """The workload with much memory, no sharing and pages of one."""
    prompts, params = workload(1, 40)
    with make_engine(disable_radix_cache=True) as engine:
        return run(engine, prompts, params)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("page_size", PAGES)
def test_a_prompt_that_is_wholly_cached_gives_the_same(page_size: int, loop: str) -> None:
    """Identical output and logprobs, with at least one token computed again at its right position.
    GeeeekExplorer/nano-vllm#144, GeeeekExplorer/nano-vllm#199, lablup/mlxcel#1760, ml-explore/mlx-lm#1581
    """
    prompts = [[7] * 16, [9], list(range(4, 68)), [11, 12] * 20]
    params = [{"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}] * len(prompts)
    with make_engine(page_size=page_size, event_loop=loop) as engine:
        fresh = [run(engine, [prompt], [param])[0] for prompt, param in zip(prompts, params)]
        for _ in range(2):
            assert_same(run(engine, prompts, params), fresh)
        longer = [prompt + answer.ids for prompt, answer in zip(prompts, fresh)]
        assert_same(run(engine, longer, params), run(engine, longer, params))
        for planned in bodies(engine, BatchPlanned):
            assert min(planned.extend_lens) >= 1
        matched = [body for body in bodies(engine, PrefixMatched) if body.tokens]
        assert matched and all(body.tokens <= body.limit and body.tokens % page_size == 0 for body in matched)
        assert_books_balance(engine)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_with_little_memory_no_node_in_use_is_evicted_and_each_lock_is_released_once(
    loop: str, reference: list[Answer]
) -> None:
    """No node on the path of a live request goes, each lock is released exactly once, also on an abort, and the
    answers stay right. sgl-project/mini-sglang#46, sgl-project/mini-sglang#52, sgl-project/sglang#24153
    """
    prompts, params = workload(1, 40)
    with make_engine(max_total_tokens=240, event_loop=loop) as engine:
        for _ in range(2):
            left = engine.stream_sync(
                input_ids=prompts, sampling_params=[{**p, "max_new_tokens": 60} for p in params]
            )
            for _ in range(40):
                next(left)
            left.close()
            assert_same(run(engine, prompts, params), reference)
        assert_locks_hold(engine)
        assert bodies(engine, TreeEvicted), "memory was never short"
        assert_books_balance(engine)


def assert_locks_hold(engine: Engine) -> None:
    """Replays the tree's events: who holds which node, and that no evicted one was on a held path."""
    parents: dict[int, int] = {}
    held: dict[str, list[int]] = defaultdict(list)
    for body in bodies(engine, TreeInserted, TreeSplit, TreeLocked, TreeEvicted):
        if isinstance(body, TreeInserted):
            parents[body.node] = body.parent
        elif isinstance(body, TreeSplit):
            parents[body.upper] = parents[body.node]
            parents[body.node] = body.upper
        elif isinstance(body, TreeLocked):
            if body.delta > 0:
                held[body.rid].append(body.node)
            else:
                held[body.rid].remove(body.node)  # fails if it was released before
        else:
            in_use = {node for nodes in held.values() for each in nodes for node in path(each, parents)}
            assert body.node not in in_use
    assert {rid: nodes for rid, nodes in held.items() if nodes} == {}


def path(node: int, parents: dict[int, int]) -> list[int]:
    """The node and its ancestors below the root."""
    out = []
    while node in parents:
        out.append(node)
        node = parents[node]
    return out


@pytest.mark.parametrize("tokens", [8192, 320])
@pytest.mark.parametrize("page_size", PAGES)
def test_every_page_size_gives_what_single_slots_give(
    page_size: int, tokens: int, reference: list[Answer]
) -> None:
    """Eviction, retraction and allocation count whole pages, a page has one owner, and prompts shorter than a page
    work. sgl-project/mini-sglang#80, sgl-project/sglang#9989, sgl-project/sglang#4602, sgl-project/sglang#26450,
    sgl-project/sglang#10637
    """
    prompts, params = workload(1, 40)
    assert min(map(len, prompts)) < 4
    with make_engine(max_total_tokens=tokens, page_size=page_size) as engine:
        for _ in range(2):
            assert_same(run(engine, prompts, params), reference)
        assert_books_balance(engine)
        if tokens < 1000:
            assert bodies(engine, TreeEvicted)
        for body in bodies(engine, PoolReturned, RequestRetracted, TreeEvicted):
            if isinstance(body, TreeEvicted):
                assert body.tokens % page_size == 0
            elif isinstance(body, PoolReturned):
                assert_whole_pages(body, page_size)


def assert_whole_pages(body: PoolReturned, page_size: int) -> None:
    """A page that is given back comes once, and as a whole unless its owner never filled it."""
    slots = [int.from_bytes(body.slots[at : at + 4], "little") for at in range(0, len(body.slots), 4)]
    assert len(set(slots)) == len(slots)
    assert min(slots, default=page_size) >= page_size, "slots below the first page belong to nobody"
    if body.why in ("evict", "flush"):
        assert set(Counter(slot // page_size for slot in slots).values()) <= {page_size}


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_the_books_balance_at_every_idle_moment(loop: str) -> None:
    """free + evictable + protected == total with nothing protected, without false alarms from a step under way.
    sgl-project/sglang#35270, sgl-project/sglang-jax#982, sgl-project/sglang#26796
    """
    prompts, params = workload(5, 30)
    with make_engine(max_total_tokens=2048, event_loop=loop) as engine:
        for prompt, param in zip(prompts, params):
            run(engine, [prompt], [param])  # the scheduler becomes idle after each
        for number in range(10):
            stream = engine.stream_sync(input_ids=prompts[number], sampling_params={"max_new_tokens": 500})
            next(stream, None)
            stream.close()
            engine.internal_state()
        assert_books_balance(engine)
        idle = bodies(engine, LoopIdle)
        assert len(idle) > 10
        assert all(body.kv_free + body.kv_evictable == 2048 and body.kv_protected == 0 for body in idle)
