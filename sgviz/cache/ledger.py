"""Ledger: where every token of the pool is, and the audit that proves it. Mirrors SGLang's leak checks.

The audit recounts everything from the owners (free list, tree, rows of the requests) and compares it with
the counters; it is thorough and slow, for idle times and tests. Imports: numpy, cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sgviz.cache.errors import CacheCorrupt
from sgviz.cache.req_kv import NO_ROW, HoldsKv, Slots, no_slots

if TYPE_CHECKING:
    from sgviz.cache.kv_cache import KVCache


class Ledger(NamedTuple):
    """Tokens of the pool by owner, in whole pages: free + evictable + protected + private == total.

    Attributes:
        free: nobody's.
        evictable, protected: the tree's, unlocked and locked.
        private: of requests, not (yet) in the tree.
        total: the size of the pool.
    """

    free: int
    evictable: int
    protected: int
    private: int
    total: int

    @property
    def balanced(self) -> bool:
        return self.free + self.evictable + self.protected + self.private == self.total

    def __str__(self) -> str:
        return (
            f"free {self.free} + evictable {self.evictable} + protected {self.protected} "
            f"+ private {self.private} of total {self.total} tokens"
        )


def audit(cache: KVCache, reqs: Sequence[HoldsKv]) -> None:
    """Recount the memory; `reqs` are all requests that hold a lock or a row.

    Raises:
        CacheCorrupt: says what is wrong and gives the whole ledger.
    """
    cache.tree.check()
    try:
        _check_rows(cache, reqs)
        for req in reqs:
            _check_req(cache, req)
        _check_locks(cache, reqs)
        _check_owners(cache, reqs)
    except CacheCorrupt as error:
        raise CacheCorrupt(f"{error.message}; {cache.ledger()}") from error


def _check_rows(cache: KVCache, reqs: Sequence[HoldsKv]) -> None:
    pool = cache.req_to_token_pool
    rows = [req.kv.req_pool_idx for req in reqs if req.kv.req_pool_idx != NO_ROW]
    if len(set(rows)) != len(rows):
        raise CacheCorrupt(f"two requests share a row: {sorted(rows)}")
    if len(rows) + pool.available_size() != pool.size:
        raise CacheCorrupt(
            f"{len(rows)} rows held + {pool.available_size()} free are not the {pool.size} there are"
        )


def _check_req(cache: KVCache, req: HoldsKv) -> None:
    kv, page = req.kv, cache.page_size
    if not 0 <= kv.protected <= kv.allocated or kv.protected % page:
        raise CacheCorrupt(
            f"request {req.rid}: protected {kv.protected} of allocated {kv.allocated}, page {page}"
        )
    mine = kv.prefix if kv.req_pool_idx == NO_ROW else cache.row_slots(req)
    tree = [node.value for node in kv.node.path()] if kv.node is not None else []
    protected = np.concatenate([no_slots(), *tree])
    if len(protected) != kv.protected or (protected != mine[: kv.protected]).any():
        raise CacheCorrupt(
            f"request {req.rid}: its first {kv.protected} slots are not those of the node it locked"
        )
    expected = mine[::page].repeat(page)[: len(mine)] + np.arange(len(mine)) % page
    if (mine[::page] % page).any() or (mine != expected).any():
        raise CacheCorrupt(f"request {req.rid}: its slots do not fill pages in order")


def _check_locks(cache: KVCache, reqs: Sequence[HoldsKv]) -> None:
    held: dict[int, int] = {}
    for req in reqs:
        for node in req.kv.node.path() if req.kv.node is not None else []:
            held[node.id] = held.get(node.id, 0) + 1
    for node in cache.tree.nodes():
        if node.lock_ref != held.get(node.id, 0):
            raise CacheCorrupt(
                f"tree node {node.id} has {node.lock_ref} locks, {held.get(node.id, 0)} requests hold it"
            )


def _check_owners(cache: KVCache, reqs: Sequence[HoldsKv]) -> None:
    """Every page has exactly one owner, and the counters agree with the owners."""
    page = cache.page_size
    private = [_private_pages(cache, req) for req in reqs]
    tree = [node.value[::page] // page for node in cache.tree.nodes()]
    owned = np.concatenate([cache.allocator.free_pages(), cache.allocator.retired_pages(), *tree, *private])
    owners = np.bincount(owned, minlength=cache.allocator.pages + 1)[1:]
    if (owners != 1).any():
        at = int((owners != 1).argmax())
        raise CacheCorrupt(f"slot {(at + 1) * page} has {owners[at]} owners instead of one")
    count = sum(len(pages) for pages in private) * page
    if count != cache.private_size() or not cache.ledger().balanced:
        raise CacheCorrupt(f"the requests own {count} private tokens, the books say otherwise")


def _private_pages(cache: KVCache, req: HoldsKv) -> Slots:
    if req.kv.req_pool_idx == NO_ROW:
        return no_slots()
    return cache.row_slots(req)[req.kv.protected :: cache.page_size] // cache.page_size
