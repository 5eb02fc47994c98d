"""The audit: each way to lose or share memory is found, and the numbers are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_tools import Request, cache_of, run

from sgviz.cache.errors import CacheCorrupt
from sgviz.cache.kv_cache import KVCache
from sgviz.cache.ledger import Ledger


def test_a_ledger_balances_or_not_and_says_its_numbers() -> None:
    assert Ledger(1, 2, 3, 4, 10).balanced and not Ledger(1, 2, 3, 4, 11).balanced
    assert str(Ledger(1, 2, 3, 4, 10)) == "free 1 + evictable 2 + protected 3 + private 4 of total 10 tokens"


def lose_a_page(cache: KVCache, _: Request) -> None:
    cache.allocator.alloc_extend([0], [1], [0])


def lose_a_row(cache: KVCache, _: Request) -> None:
    cache.req_to_token_pool.alloc()


def leave_a_lock(cache: KVCache, req: Request) -> None:
    cache.tree.inc_lock_ref(cache.match(req.ids, "", 8).node)


def share_a_slot(cache: KVCache, req: Request) -> None:
    cache.req_to_token_pool.table[req.kv.req_pool_idx, 8:] = 4


def forget_the_tree(cache: KVCache, req: Request) -> None:
    cache.req_to_token_pool.table[req.kv.req_pool_idx, :4] = cache.req_to_token_pool.table[
        req.kv.req_pool_idx, 4:8
    ]


def tear_a_page(cache: KVCache, req: Request) -> None:
    cache.req_to_token_pool.table[req.kv.req_pool_idx, 9] += 1


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lose_a_page, "has 0 owners"),
        (lose_a_row, "1 rows held \\+ 2 free are not"),
        (leave_a_lock, "has 2 locks, .*1"),
        (share_a_slot, "do not fill pages|has 2 owners"),
        (forget_the_tree, "request a: its first 8 slots"),
        (tear_a_page, "do not fill pages"),
    ],
)
def test_the_check_finds_losses_and_gives_the_numbers(
    spoil: Callable[[KVCache, Request], None], what: str
) -> None:
    cache, _ = cache_of(32, 4)
    req = run(cache, "a", list(range(10)))
    cache.checkpoint(req, req.ids)
    cache.check([req])
    spoil(cache, req)
    with pytest.raises(CacheCorrupt, match=f"({what}).*free .* evictable .* total 32"):
        cache.check([req])


def test_two_requests_with_one_row_are_found() -> None:
    cache, _ = cache_of(32, 1)
    a, b = run(cache, "a", [1]), run(cache, "b", [2])
    b.kv.req_pool_idx = a.kv.req_pool_idx
    with pytest.raises(CacheCorrupt, match="share a row"):
        cache.check([a, b])
