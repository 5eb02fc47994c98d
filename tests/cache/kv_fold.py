"""The KV memory rebuilt from events alone: what a reader of a recording can know about it.

`KvFold.apply` takes the bodies in order. It also refuses a story that cannot be true (a slot taken from
somebody else, a locked node evicted), so that it is a check of the events themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sgviz.cache.ledger import Ledger
from sgviz.events.schema import (
    AnyBody,
    CacheFlushed,
    PoolReturned,
    PoolTaken,
    RowReturned,
    RowTaken,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)  # fmt: skip

Owner = tuple[str, str | int]  # ("request", rid), ("node", id) or ("leaving", "") between two events


@dataclass
class FoldNode:
    parent: int
    slots: list[int]
    token_ids: list[int]
    locks: int = 0
    children: int = 0


@dataclass
class KvFold:
    total: int
    page_size: int
    free: int = -1
    rows: dict[int, str] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)  # by slot
    nodes: dict[int, FoldNode] = field(default_factory=dict)  # without the root, 0
    locked_by: dict[str, int] = field(default_factory=dict)  # the node that a request holds

    def __post_init__(self) -> None:
        self.free = self.total

    def apply(self, body: AnyBody) -> None:
        match body:
            case RowTaken():
                assert body.row not in self.rows
                self.rows[body.row] = body.rid
            case RowReturned():
                assert self.rows.pop(body.row) == body.rid
            case PoolTaken():
                self._taken(body)
            case PoolReturned():
                self._returned(body)
            case TreeInserted():
                self._inserted(body)
            case TreeSplit():
                self._split(body)
            case TreeEvicted():
                self._evicted(body)
            case TreeLocked():
                self._locked(body)
            case CacheFlushed(ok=True):
                assert not self.locked_by
                for node in self.nodes.values():
                    self._own(node.slots, ("leaving", ""))
                self.nodes.clear()

    def ledger(self) -> Ledger:
        evictable = sum(len(node.slots) for node in self.nodes.values() if not node.locks)
        protected = sum(len(node.slots) for node in self.nodes.values() if node.locks)
        pages = {slot // self.page_size for slot, owner in self.owners.items() if owner[0] == "request"}
        return Ledger(self.free, evictable, protected, len(pages) * self.page_size, self.total)

    def path_slots(self, node: int) -> list[int]:
        """Slots from the root to the end of `node`."""
        if node == 0:
            return []
        return self.path_slots(self.nodes[node].parent) + self.nodes[node].slots

    def _own(self, slots: list[int], owner: Owner) -> None:
        for slot in slots:
            self.owners[slot] = owner

    def _pages(self, slots: list[int]) -> int:
        return len({slot // self.page_size for slot in slots})

    def _taken(self, body: PoolTaken) -> None:
        slots = decode(body.slots)
        assert sum(body.counts) == len(slots) and len(body.rids) == len(body.counts)
        before = {slot // self.page_size: owner for slot, owner in self.owners.items()}
        at = 0
        for rid, count in zip(body.rids, body.counts, strict=True):
            mine, at = slots[at : at + count], at + count
            for slot in mine:
                assert slot not in self.owners, f"slot {slot} is {self.owners[slot]}'s"
                assert before.get(slot // self.page_size, ("request", rid)) == ("request", rid)
            self.free -= self.page_size * len({slot // self.page_size for slot in mine} - set(before))
            self._own(mine, ("request", rid))
        assert self.free == body.free

    def _returned(self, body: PoolReturned) -> None:
        slots = decode(body.slots)
        from_tree = body.why in ("evict", "flush")
        owner: Owner = ("leaving", "") if from_tree else ("request", body.rid)
        for slot in slots:
            assert self.owners.pop(slot) == owner
        self.free += self._pages(slots) * self.page_size
        assert self.free == body.free

    def _inserted(self, body: TreeInserted) -> None:
        slots = decode(body.slots)
        assert all(self.owners[slot] == ("request", body.rid) for slot in slots)
        self._own(slots, ("node", body.node))
        self.nodes[body.node] = FoldNode(body.parent, slots, decode(body.token_ids))
        if body.parent:
            self.nodes[body.parent].children += 1

    def _split(self, body: TreeSplit) -> None:
        lower = self.nodes[body.node]
        upper = FoldNode(lower.parent, lower.slots[: body.at], lower.token_ids[: body.at], lower.locks, 1)
        self.nodes[body.upper] = upper
        lower.parent, lower.slots, lower.token_ids = (
            body.upper,
            lower.slots[body.at :],
            lower.token_ids[body.at :],
        )
        self._own(upper.slots, ("node", body.upper))

    def _evicted(self, body: TreeEvicted) -> None:
        node = self.nodes.pop(body.node)
        assert node.locks == 0 and node.children == 0 and len(node.slots) == body.tokens
        if node.parent:
            self.nodes[node.parent].children -= 1
        self._own(node.slots, ("leaving", ""))

    def _locked(self, body: TreeLocked) -> None:
        moved, at = 0, body.node
        while at:
            node = self.nodes[at]
            was, node.locks = node.locks, node.locks + body.delta
            assert node.locks >= 0
            moved += len(node.slots) if not was or not node.locks else 0
            at = node.parent
        assert moved == body.tokens
        if body.delta > 0:
            self.locked_by[body.rid] = body.node
        elif self.locked_by.get(body.rid) == body.node:
            del self.locked_by[body.rid]


def decode(raw: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(raw, dtype="<i4")]
