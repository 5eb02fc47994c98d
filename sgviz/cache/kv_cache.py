"""KVCache: rows, pages and tree as one memory. Mirrors SGLang's mem_cache and alloc_for_extend/decode.

The only door of the scheduler to KV memory. A request's life here: `match`, `adopt` (locks the prefix),
`alloc_extend` (prefill chunks and decode steps alike), `checkpoint` after each chunk, `release` once.
A slot has one owner: the free list, a tree node, or a request, to which [protected, allocated) are private.
Simplified: one tier (no host copies), one kind of KV, frees take effect at once.
Imports: numpy, events, cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from sgviz.cache.allocator import PagedTokenAllocator
from sgviz.cache.errors import CacheCorrupt, CacheMisuse, OutOfMemory
from sgviz.cache.ledger import Ledger, audit
from sgviz.cache.radix_cache import RadixCache
from sgviz.cache.releasable import Releasable
from sgviz.cache.req_kv import NO_ROW, HoldsKv, ReqKvInfo, Slots, no_slots
from sgviz.cache.req_to_token_pool import ReqToTokenPool
from sgviz.cache.tree_node import Ids, Match, TreeNode, as_bytes, as_ids
from sgviz.events.schema import CacheFlushed, PoolReturned, PoolTaken, RowReturned, RowTaken
from sgviz.events.tracer import Tracer

__all__ = ["KVCache", "Ledger", "Match"]


class KVCache:
    """The memory of one scheduler; not thread-safe, like the scheduler itself.

    Args:
        size: tokens of the pool, a multiple of `page_size`.
        page_size: tokens of a page.
        rows: requests that can hold a row at once.
        max_context_len: positions of a row.
        trace: gets row.*, pool.*, tree.* and cache.flushed.
        disable_radix_cache: nothing is kept after a request ends, nothing matches.
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        rows: int,
        max_context_len: int,
        trace: Tracer,
        disable_radix_cache: bool = False,
    ) -> None:
        self.trace = trace
        self.page_size = page_size
        self.disable_radix_cache = disable_radix_cache
        self.allocator = PagedTokenAllocator(size, page_size)
        self.req_to_token_pool = ReqToTokenPool(rows, max_context_len)
        self.tree = RadixCache(page_size, trace)
        self._private = 0
        self._held: list[TreeNode] = []

    # ------------------------------------------------------------ sizes, in tokens

    @property
    def total(self) -> int:
        return self.allocator.size

    def available_size(self) -> int:
        """Free now."""
        return self.allocator.available_size()

    def evictable_size(self) -> int:
        """In tree nodes that nobody has locked."""
        return self.tree.evictable_size()

    def protected_size(self) -> int:
        """In tree nodes that requests have locked."""
        return self.tree.protected_size()

    def private_size(self) -> int:
        """In pages owned by requests; a partly used page counts whole."""
        return self._private

    def room(self) -> int:
        """What could be allocated: free and evictable."""
        return self.available_size() + self.evictable_size()

    def releasable(self, reqs: Sequence[HoldsKv]) -> int:
        """By how many tokens `room` would grow if all of `reqs` gave up what they hold; changes nothing."""
        count = Releasable(self.page_size)
        for req in reqs:
            count.add(req)
        return count.tokens

    def ledger(self) -> Ledger:
        return Ledger(
            self.available_size(), self.evictable_size(), self.protected_size(), self._private, self.total
        )

    def check(self, reqs: Sequence[HoldsKv]) -> None:
        """Recount everything; `reqs` are all requests that hold KV. Slow.

        Raises:
            CacheCorrupt: a token or row is lost or owned twice, a lock is left; with all numbers.
        """
        audit(self, reqs)

    def row_slots(self, req: HoldsKv) -> Slots:
        """[allocated] slots of the positions of a request that has a row (a copy)."""
        return self._positions(req, 0, req.kv.allocated)

    # ------------------------------------------------------------ prefix

    def match(self, ids: Sequence[int] | Ids, namespace: str, limit: int) -> Match:
        """The cached prefix of `ids`, at most `limit` tokens, in whole pages. Locks nothing."""
        if self.disable_radix_cache or limit <= 0:
            return Match(0, no_slots(), self.tree.root)
        return self.tree.match(ids[:limit], namespace)

    def peek(self, ids: Sequence[int] | Ids, namespace: str, limit: int | None = None) -> int:
        """Tokens that `match` would find; changes nothing, not even what was used last."""
        return 0 if self.disable_radix_cache else self.tree.peek(ids[:limit], namespace)

    def peek_path(self, ids: Sequence[int] | Ids, namespace: str) -> tuple[int, ...]:
        """Ids of the tree nodes that hold the cached prefix, from the root downwards; changes nothing."""
        return () if self.disable_radix_cache else self.tree.peek_path(ids, namespace)

    @contextmanager
    def held(self, node: TreeNode) -> Iterator[None]:
        """Keep `node` from eviction while admission decides; nobody is told."""
        self._refuse_stale(node)
        self.tree.inc_lock_ref(node)
        self._held.append(node)
        try:
            yield
        finally:
            self._held.remove(node)
            self.tree.dec_lock_ref(node)

    def adopt(self, req: HoldsKv, match: Match) -> None:
        """The request is admitted with this prefix: lock it until `release`.

        Raises:
            CacheMisuse: the request holds KV already, or the matched node was evicted since.
        """
        if req.kv.node is not None or req.kv.req_pool_idx != NO_ROW:
            raise CacheMisuse(
                f"request {req.rid} holds KV already (row {req.kv.req_pool_idx}); release it before adopting"
            )
        self._refuse_stale(match.node)
        # What `held` protects silently must still count as moved in the event of the real lock.
        for node in self._held:
            self.tree.dec_lock_ref(node)
        self.tree.inc_lock_ref(match.node, req.rid)
        for node in self._held:
            self.tree.inc_lock_ref(node)
        for node in match.node.path():
            node.hit_count += 1
        req.kv = ReqKvInfo(
            prefix=match.slots, allocated=match.length, protected=match.length, node=match.node
        )

    def checkpoint(self, req: HoldsKv, ids: Sequence[int] | Ids) -> None:
        """Put the whole pages of `ids` into the tree and go on from there; all of them have KV in the row.

        Where the tree had a page already, the request's own goes back and the row points to the tree's.
        The tail shorter than a page stays private.
        """
        if self.disable_radix_cache:
            return
        kv = req.kv
        key = as_ids(ids)
        end = self._insert(req, key)
        if end <= kv.protected:
            return
        match = self.tree.match(key[:end], req.namespace)
        if match.length != end:
            raise CacheCorrupt(
                f"request {req.rid}: {end} tokens were inserted, {match.length} are found again"
            )
        self.req_to_token_pool.table[kv.req_pool_idx, kv.protected : end] = match.slots[kv.protected :]
        kv.protected = end
        self.tree.inc_lock_ref(match.node, req.rid)
        if kv.node is not None:
            self.tree.dec_lock_ref(kv.node, req.rid)
        kv.node = match.node

    # ------------------------------------------------------------ slots

    def extend_need(self, reqs: Sequence[HoldsKv], new_lens: Sequence[int]) -> int:
        """Tokens, in whole pages, that `alloc_extend` to these lengths takes from the pool."""
        return self.allocator.pages_needed([req.kv.allocated for req in reqs], new_lens) * self.page_size

    def ensure(self, tokens: int) -> bool:
        """Evict until `tokens` are free; says whether they are."""
        short = tokens - self.available_size()
        if short > 0:
            self.evict(short)
        return self.available_size() >= tokens

    def alloc_extend(self, reqs: Sequence[HoldsKv], new_lens: Sequence[int]) -> Slots:
        """Grow every request to its new length (tokens with a slot), evicting if need be.

        A request without a row takes one, which begins with its cached prefix.

        Args:
            reqs: [n] different requests.
            new_lens: [n] lengths, not below what each has.

        Returns:
            int64 [sum of growth], request after request.

        Raises:
            OutOfMemory: tokens or rows do not suffice; nothing was changed.
            CacheMisuse: a length is below the request's or beyond a row; nothing was changed.
        """
        if not reqs:
            return no_slots()
        old = np.array([req.kv.allocated for req in reqs], dtype=np.int64)
        new = np.array(new_lens, dtype=np.int64)
        taken = self._make_room(reqs, old, new)
        self._take_rows(reqs)
        rows = np.array([req.kv.req_pool_idx for req in reqs], dtype=np.int64)
        # An empty request reads column -1 here; the allocator looks at last slots of partly used pages only.
        slots = self.allocator.alloc_extend(old, new, self.req_to_token_pool.table[rows, old - 1])
        if slots is None:
            raise CacheCorrupt(f"{taken} tokens were free a moment ago; {self.ledger()}")
        self._private += taken
        self._write(rows, old, new, slots)
        for req, length in zip(reqs, new.tolist(), strict=True):
            req.kv.allocated = length
        if self.trace.on and len(slots):
            self._tell_taken(reqs, new - old, slots)
        return slots

    def evict(self, tokens: int) -> int:
        """Free at least `tokens` from the unlocked part of the tree, if it has them; returns how many."""
        slots = self.tree.evict(tokens)
        self.allocator.free(slots)
        self._tell_returned("", slots, "evict")
        return len(slots)

    def retire(self, tokens: int) -> Slots:
        """Make the pool smaller by up to `tokens`, evicting if need be; returns the slots that left it for good.

        Pages in use stay: there may be fewer than asked for, and the rest can be asked for again.
        """
        if tokens <= 0:
            return no_slots()
        self.ensure(tokens)
        return self.allocator.retire(tokens)

    # ------------------------------------------------------------ endings

    def release(self, req: HoldsKv, ids: Sequence[int] | Ids, *, insert: bool, why: str) -> None:
        """The request gives up everything: private slots, lock and row. Harmless if it holds nothing.

        Args:
            ids: the committed ids (all with KV); may be fewer than the positions allocated.
            insert: keep the whole pages of `ids` in the tree. Without a row there is nothing to keep.
            why: of pool.returned: finish, retract, abort.
        """
        kv = req.kv
        if kv.req_pool_idx != NO_ROW:
            start = kv.protected
            if insert and not self.disable_radix_cache:
                start = max(start, self._insert(req, ids))
                why = "tail"
            self._free_private(req, start, kv.allocated, why)
        if kv.node is not None:
            self.tree.dec_lock_ref(kv.node, req.rid)
        if kv.req_pool_idx != NO_ROW:
            self.req_to_token_pool.free(kv.req_pool_idx)
            if self.trace.on:
                self.trace.emit(RowReturned(rid=req.rid, row=kv.req_pool_idx))
        req.kv = ReqKvInfo()

    def flush(self) -> bool:
        """Drop the whole tree. Refused (False) while any request holds memory."""
        ledger = self.ledger()
        if ledger.protected or ledger.private:
            why = f"requests hold {ledger.protected} protected and {ledger.private} private tokens"
            if self.trace.on:
                self.trace.emit(CacheFlushed(ok=False, why=why))
            return False
        if self.trace.on:
            self.trace.emit(CacheFlushed(ok=True, why=""))
        slots = self.tree.reset()
        self.allocator.free(slots)
        self._tell_returned("", slots, "flush")
        return True

    # ------------------------------------------------------------ inside

    def _refuse_stale(self, node: TreeNode) -> None:
        if not node.attached:
            raise CacheMisuse(f"tree node {node.id} was evicted after the match; match again")

    def _positions(self, req: HoldsKv, start: int, end: int) -> Slots:
        return self.req_to_token_pool.table[req.kv.req_pool_idx, start:end].astype(np.int64)

    def _insert(self, req: HoldsKv, ids: Sequence[int] | Ids) -> int:
        """Insert the whole pages of `ids` and free the request's duplicates; returns where the pages end."""
        kv = req.kv
        if len(ids) > kv.allocated or kv.req_pool_idx == NO_ROW:
            held = f"row {kv.req_pool_idx} has {kv.allocated} positions"
            raise CacheMisuse(f"request {req.rid}: {len(ids)} ids cannot be cached, {held}")
        end = len(ids) - len(ids) % self.page_size
        if end > kv.protected:
            key = as_ids(ids[:end])
            if self.tree.peek(key[: kv.protected], req.namespace) != kv.protected:
                raise CacheMisuse(f"request {req.rid}: its ids are not the {kv.protected} it has locked")
            present = self.tree.insert(key, self._positions(req, 0, end), req.namespace, req.rid)
            self._private -= end - present
            self._free_private(req, kv.protected, present, "duplicate")
        return end

    def _free_private(self, req: HoldsKv, start: int, end: int, why: str) -> None:
        """Positions [start, end) go back, with the rest of the last page; `start` begins a page."""
        if start >= end:
            return
        slots = self._positions(req, start, end)
        self.allocator.free(slots)
        self._private -= -(-(end - start) // self.page_size) * self.page_size
        self._tell_returned(req.rid, slots, why)

    def _make_room(self, reqs: Sequence[HoldsKv], old: Slots, new: Slots) -> int:
        """See that rows and tokens suffice, evicting if they do then; returns the tokens to be taken."""
        longest, width = int(new.max()), self.req_to_token_pool.max_context_len
        if longest > width:
            rid = reqs[int(new.argmax())].rid
            raise CacheMisuse(f"request {rid} would grow to {longest} tokens, a row has {width} positions")
        rows = sum(req.kv.req_pool_idx == NO_ROW for req in reqs)
        if rows > self.req_to_token_pool.available_size():
            free = self.req_to_token_pool.available_size()
            raise OutOfMemory(f"{rows} rows are needed, {free} of {self.req_to_token_pool.size} are free")
        need = self.allocator.pages_needed(old, new) * self.page_size
        if need > self.room():
            raise OutOfMemory(f"{need} tokens are needed for {len(reqs)} requests, there are {self.ledger()}")
        self.ensure(need)
        return need

    def _take_rows(self, reqs: Sequence[HoldsKv]) -> None:
        pool = self.req_to_token_pool
        for req in reqs:
            kv = req.kv
            if kv.req_pool_idx == NO_ROW:
                row = pool.alloc()
                assert row is not None  # counted before
                pool.table[row, : len(kv.prefix)] = kv.prefix
                kv.req_pool_idx, kv.prefix = row, no_slots()
                if self.trace.on:
                    self.trace.emit(RowTaken(rid=req.rid, row=row))

    def _write(self, rows: Slots, old: Slots, new: Slots, slots: Slots) -> None:
        table = self.req_to_token_pool.table
        if len(slots) == len(rows) and (new - old == 1).all():
            table[rows, old] = slots
            return
        at = 0
        for row, start, end in zip(rows.tolist(), old.tolist(), new.tolist(), strict=True):
            table[row, start:end] = slots[at : at + end - start]
            at += end - start

    def _tell_taken(self, reqs: Sequence[HoldsKv], counts: npt.NDArray[np.int64], slots: Slots) -> None:
        self.trace.emit(
            PoolTaken(
                rids=tuple([req.rid for req in reqs]),
                counts=tuple(counts.tolist()),
                slots=as_bytes(slots),
                free=self.available_size(),
            )
        )

    def _tell_returned(self, rid: str, slots: Slots, why: str) -> None:
        if self.trace.on and len(slots):
            self.trace.emit(PoolReturned(rid=rid, slots=as_bytes(slots), why=why, free=self.available_size()))
