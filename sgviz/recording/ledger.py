"""Who holds the KV memory, folded from `pool.*` and `tree.*` events: SGLang's four kinds of tokens.

Every token slot is free, evictable (in the tree, unlocked), protected (in the tree, locked) or private
(taken by a request and not in the tree). SGLang reports such counts at intervals; here they follow from
the single events, and the numbers that a batch states serve as the check.

With pages, a page counts as taken as soon as one of its slots is, as in the paged allocator.
Simplified: slots are counted, not mapped one by one (`audit` maps them).

Imports: events, numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sgviz.events.schema import (
    BatchPlanned,
    Body,
    EngineConfigured,
    LimitsChanged,
    LoopIdle,
    PoolReturned,
    PoolTaken,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)

UNKNOWN_OWNER = ""  # private memory taken before the recording began
_TREE_REASONS = frozenset({"evict", "flush"})
_SLOT_BYTES = 4


class Node(NamedTuple):
    """A node of the prefix tree: its parent's number, its own tokens, and their ids (int32)."""

    parent: int
    tokens: int
    token_ids: bytes = b""


@dataclass(slots=True)
class Ledger:
    """Tokens by state and owner. `free + evictable + protected + private_total == total` after every event.

    Attributes:
        private: tokens by rid. nodes: the tree by node number (the root is not in it).
        locks: how often a request holds a node (and so all above it), by `(rid, node)`.
        sized: the true total is known. tree_known: no event of the tree was lost since the start or a flush.
        exact: False before the sizes are known, and from a loss of events until a batch states its numbers.
    """

    total: int = 0
    page_size: int = 1
    free: int = 0
    evictable: int = 0
    protected: int = 0
    private_total: int = 0
    private: dict[str, int] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    locks: dict[tuple[str, int], int] = field(default_factory=dict)
    exact: bool = False
    sized: bool = False
    tree_known: bool = False
    _pages: dict[str, set[int]] = field(default_factory=dict)

    def configure(self, body: EngineConfigured) -> None:
        """An empty memory of the configured size."""
        self.sized = self.exact = self.tree_known = True
        self.total = self.free = body.max_total_num_tokens
        self.page_size = max(1, body.page_size)
        self.evictable = self.protected = self.private_total = 0
        self.private, self.nodes, self.locks, self._pages = {}, {}, {}, {}

    def copy(self) -> Ledger:
        """An independent ledger with the same numbers."""
        return Ledger(
            self.total, self.page_size, self.free, self.evictable, self.protected, self.private_total,
            dict(self.private), dict(self.nodes), dict(self.locks), self.exact, self.sized, self.tree_known,
            {rid: set(pages) for rid, pages in self._pages.items()},
        )  # fmt: skip

    def apply(self, body: Body) -> bool:
        """Move tokens as `body` says; False when it moves none."""
        match body:
            case PoolTaken():
                self._take(body)
            case PoolReturned():
                self._return(body)
            case TreeInserted():
                self._insert(body)
            case TreeLocked():
                return self._lock(body)
            case LimitsChanged():
                return self._shrink(body)
            case TreeSplit():
                self._split(body)
                return False
            case TreeEvicted():
                self.nodes.pop(body.node, None)  # the tokens move with the pool.returned beside it
                return False
            case _:
                return False
        return True

    def seed(self, stated: BatchPlanned | LoopIdle) -> None:
        """Start from stated numbers after a loss; what nobody here took belongs to an unknown owner."""
        self.free, self.evictable, self.protected = stated.kv_free, stated.kv_evictable, stated.kv_protected
        in_pools = self.free + self.evictable + self.protected
        known = sum(self.private.values()) - self.private.get(UNKNOWN_OWNER, 0)
        if not self.sized:
            self.total = in_pools + known
        self.exact = self.sized
        self.tree_known = False
        self.private_total = self.total - in_pools
        self._set(UNKNOWN_OWNER, self.private_total - known)

    def holders(self) -> list[tuple[str, int]]:
        """`(owner, tokens)` of all private memory, largest first, ties by name."""
        return sorted(self.private.items(), key=lambda item: (-item[1], item[0]))

    def _take(self, body: PoolTaken) -> None:
        if self.page_size == 1:
            private = self.private
            for rid, count in zip(body.rids, body.counts):
                if count:
                    private[rid] = private.get(rid, 0) + count
            taken = sum(body.counts)
            self.private_total += taken
            self.free -= taken
            return
        start = 0
        for rid, count in zip(body.rids, body.counts):
            span = body.slots[start * _SLOT_BYTES : (start + count) * _SLOT_BYTES]
            start += count
            tokens = self._claim(rid, span)
            self._set(rid, self.private.get(rid, 0) + tokens)
            self.private_total += tokens
            self.free -= tokens

    def _return(self, body: PoolReturned) -> None:
        tokens = self._release(body.rid, body.slots)
        self.free += tokens
        if body.why in _TREE_REASONS and not body.rid:
            self.evictable -= tokens
            if body.why == "flush":
                self.nodes, self.locks, self.tree_known = {}, {}, True
        else:
            self._give_up(body.rid, tokens)

    def _shrink(self, body: LimitsChanged) -> bool:
        """Free slots left the pool for good."""
        tokens = len(body.slots) // _SLOT_BYTES
        self.free -= tokens
        self.total = body.max_total_num_tokens if self.sized else self.total - tokens
        return tokens > 0

    def _insert(self, body: TreeInserted) -> None:
        tokens = self._release(body.rid, body.slots)
        self.nodes[body.node] = Node(body.parent, tokens, body.token_ids)
        self.evictable += tokens
        self._give_up(body.rid, tokens)

    def _split(self, body: TreeSplit) -> None:
        lower = self.nodes.get(body.node)
        if lower is None:
            return
        cut = body.at * _SLOT_BYTES
        self.nodes[body.upper] = Node(lower.parent, body.at, lower.token_ids[:cut])
        self.nodes[body.node] = Node(body.upper, lower.tokens - body.at, lower.token_ids[cut:])

    def _lock(self, body: TreeLocked) -> bool:
        key = (body.rid, body.node)
        held = self.locks.get(key, 0) + body.delta
        if held > 0:
            self.locks[key] = held
        else:
            self.locks.pop(key, None)
        moved = body.tokens if body.delta > 0 else -body.tokens
        self.protected += moved
        self.evictable -= moved
        return moved != 0

    def _give_up(self, rid: str, tokens: int) -> None:
        self.private_total -= tokens
        own = self.private.get(rid, 0)
        self._set(rid, own - min(own, tokens))
        if tokens > own:
            self._set(UNKNOWN_OWNER, self.private.get(UNKNOWN_OWNER, 0) - (tokens - own))

    def _set(self, rid: str, tokens: int) -> None:
        if tokens:
            self.private[rid] = tokens
        else:
            self.private.pop(rid, None)

    def _claim(self, rid: str, slots: bytes) -> int:
        """Tokens of the pages among `slots` that `rid` does not hold yet."""
        if self.page_size == 1:
            return len(slots) // _SLOT_BYTES
        held = self._pages.setdefault(rid, set())
        before = len(held)
        held.update(self._page_ids(slots))
        return (len(held) - before) * self.page_size

    def _release(self, rid: str, slots: bytes) -> int:
        """Tokens of the pages among `slots`, which `rid` no longer holds."""
        if self.page_size == 1:
            return len(slots) // _SLOT_BYTES
        pages = self._page_ids(slots)
        held = self._pages.get(rid)
        if held is not None:
            held.difference_update(pages)
            if not held:
                del self._pages[rid]
        return len(pages) * self.page_size

    def _page_ids(self, slots: bytes) -> list[int]:
        pages: list[int] = np.unique(np.frombuffer(slots, dtype="<i4") // self.page_size).tolist()
        return pages
