"""RadixCache: a tree of token ids whose nodes own KV slots. Mirrors SGLang's RadixCache (LRU, one tier).

Edges are numpy arrays compared whole, so a long prompt costs a few comparisons. Every length is a
multiple of the page; a node's children are found by namespace and first page of ids. Time is a counter of
matches and inserts: replays evict the same nodes. Simplified: only LRU, no priorities, hashes or host copies.
The tree does not free slots: `evict` and `reset` hand them to the caller, and `insert` takes them over.
Imports: numpy, events, cache.errors.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from sgviz.cache.errors import CacheCorrupt, CacheMisuse
from sgviz.cache.radix_check import check_tree
from sgviz.cache.req_kv import Slots, no_slots
from sgviz.cache.tree_node import Ids, Match, TreeNode, as_bytes, as_ids, child_key
from sgviz.errors import ConfigError
from sgviz.events.schema import TreeEvicted, TreeInserted, TreeLocked, TreeSplit
from sgviz.events.tracer import Tracer

__all__ = ["Match", "RadixCache", "TreeNode"]


class RadixCache:
    """The tree.

    Args:
        page_size: all lengths are multiples of it.
        trace: gets tree.inserted, tree.split, tree.evicted and tree.locked.

    Attributes:
        changes: how often a node came, went or was cut so far.
    """

    def __init__(self, page_size: int, trace: Tracer) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size {page_size} is not allowed; it must be at least 1")
        self.page_size = page_size
        self.trace = trace
        self.root = TreeNode(0, None, as_ids(()), no_slots(), lock_ref=1)
        self._next_id = 1
        self._step = 0
        self._evictable = 0
        self._protected = 0
        self._nodes = 0
        self.changes = 0
        # Entries may be stale: popped ones are checked, and queued again if the node was used since.
        self._heap: list[tuple[int, int, TreeNode]] = []

    @property
    def num_nodes(self) -> int:
        """Without the root."""
        return self._nodes

    def evictable_size(self) -> int:
        """Tokens in nodes that nobody has locked."""
        return self._evictable

    def protected_size(self) -> int:
        """Tokens in locked nodes."""
        return self._protected

    def match(self, ids: Sequence[int] | Ids, namespace: str = "") -> Match:
        """The longest cached prefix in whole pages. Cuts a node matched in part; marks the path used."""
        node, length = self._descend(self._floored(ids), namespace)
        path = node.path()
        slots = np.concatenate([part.value for part in path]) if path else no_slots()
        return Match(length, slots, node)

    def peek(self, ids: Sequence[int] | Ids, namespace: str = "") -> int:
        """Tokens that `match` would find; changes nothing."""
        return sum(common for _, common in self._follow(self._floored(ids), namespace))

    def peek_path(self, ids: Sequence[int] | Ids, namespace: str = "") -> tuple[int, ...]:
        """Ids of the nodes that `match` would go through, from the root downwards, the last maybe in part."""
        return tuple([node.id for node, _ in self._follow(self._floored(ids), namespace)])

    def insert_ids(self, ids: Sequence[int] | Ids, namespace: str = "") -> int:
        """`insert` into a tree that owns no memory: one that only compares requests with each other."""
        return self.insert(ids, np.zeros(len(ids), dtype=np.int64), namespace)

    def insert(self, ids: Sequence[int] | Ids, slots: Slots, namespace: str = "", rid: str = "") -> int:
        """Take over the slots of those whole pages of `ids` that are not in the tree yet.

        Args:
            ids, slots: [n] each; a tail shorter than a page is ignored.
            rid: the request that owned the slots, for the event.

        Returns:
            Tokens that were there already. The caller keeps `slots[:present]`; some may be the tree's.
        """
        key = self._floored(ids)
        if len(slots) < len(key):
            raise CacheMisuse(f"{len(key)} ids cannot be inserted with only {len(slots)} slots")
        parent, present = self._descend(key, namespace)
        if present < len(key):
            value = np.array(slots[present : len(key)], dtype=np.int64)
            self._add_leaf(parent, key[present:].copy(), value, namespace, rid, present)
        return present

    def inc_lock_ref(self, node: TreeNode, rid: str | None = None) -> int:
        """Lock `node` and its ancestors; returns the tokens that became protected. With a `rid`: an event."""
        moved = 0
        for held in _up(node):
            if held.lock_ref == 0:
                moved += len(held.key)
            held.lock_ref += 1
        self._evictable -= moved
        self._protected += moved
        self._tell_lock(node, rid, +1, moved)
        return moved

    def dec_lock_ref(self, node: TreeNode, rid: str | None = None) -> int:
        """Undo one `inc_lock_ref`; returns the tokens that became evictable."""
        if not node.is_root and (node.lock_ref < 1 or not node.attached):
            raise CacheMisuse(f"node {node.id} is unlocked but has {node.lock_ref} locks")
        moved = 0
        for held in _up(node):
            held.lock_ref -= 1
            if held.lock_ref == 0:
                moved += len(held.key)
                self._queue_if_leaf(held)
        self._evictable += moved
        self._protected -= moved
        self._tell_lock(node, rid, -1, moved)
        return moved

    def evict(self, tokens: int) -> Slots:
        """Drop unlocked leaves, least recently used first, until `tokens` are free or none is left.

        Returns:
            The slots of the dropped nodes, now the caller's; may be more than asked for.
        """
        dropped: list[Slots] = []
        freed = 0
        while freed < tokens and (node := self._pop_leaf()) is not None:
            self._drop(node)
            dropped.append(node.value)
            freed += len(node.value)
        return np.concatenate(dropped) if dropped else no_slots()

    def reset(self) -> Slots:
        """Drop every node, whether locked or not; the slots are the caller's. Node ids go on counting."""
        nodes = list(self.nodes())
        for node in nodes:
            node.parent = None
        self.root.children.clear()
        self._heap.clear()
        self._evictable = self._protected = self._nodes = 0
        self.changes += 1
        return np.concatenate([node.value for node in nodes]) if nodes else no_slots()

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents before their children, in order of insertion."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def check(self) -> None:
        """Walk the whole tree.

        Raises:
            CacheCorrupt: names the invariant that is broken and the node.
        """
        nodes = list(self.nodes())
        if len(nodes) != self._nodes:
            raise CacheCorrupt(f"the tree has {len(nodes)} nodes, its counter says {self._nodes}")
        check_tree(self.root, nodes, self.page_size, self._evictable, self._protected)

    # ------------------------------------------------------------ walking

    def _floored(self, ids: Sequence[int] | Ids) -> Ids:
        key = as_ids(ids)
        return key[: len(key) - len(key) % self.page_size]

    def _child(self, node: TreeNode, key: Ids, at: int, namespace: str) -> TreeNode | None:
        if at == len(key):
            return None
        return node.children.get(child_key(key[at:], self.page_size, namespace))

    def _common(self, child: TreeNode, key: Ids, at: int) -> int:
        """How many leading tokens the edge shares with `key[at:]`, in whole pages."""
        n = min(len(child.key), len(key) - at)
        differs = child.key[:n] != key[at : at + n]
        first = int(differs.argmax())
        if differs[first]:
            n = first
        return n - n % self.page_size

    def _follow(self, key: Ids, namespace: str) -> Iterator[tuple[TreeNode, int]]:
        """The nodes that share tokens with `key`, each with how many; changes nothing."""
        node, at = self.root, 0
        while (child := self._child(node, key, at, namespace)) is not None:
            common = self._common(child, key, at)
            yield child, common
            if common < len(child.key):
                return
            node, at = child, at + common

    def _descend(self, key: Ids, namespace: str) -> tuple[TreeNode, int]:
        """Follow `key` as far as the tree goes, cutting the last edge where they part."""
        self._step += 1
        node, at = self.root, 0
        while (child := self._child(node, key, at, namespace)) is not None:
            common = self._common(child, key, at)
            node = self._split(child, common) if common < len(child.key) else child
            node.last_access = self._step
            at += common
        return node, at

    # ------------------------------------------------------------ changing

    def _new_node(self, parent: TreeNode, key: Ids, value: Slots, namespace: str) -> TreeNode:
        node = TreeNode(self._next_id, parent, key, value, namespace, last_access=self._step)
        self._next_id += 1
        self._nodes += 1
        self.changes += 1
        parent.children[child_key(key, self.page_size, namespace)] = node
        return node

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Put a new node with the first `at` tokens above `node`; requests that locked `node` hold both."""
        assert node.parent is not None
        upper = self._new_node(node.parent, node.key[:at].copy(), node.value[:at].copy(), node.namespace)
        upper.lock_ref = node.lock_ref
        upper.hit_count = node.hit_count
        node.parent = upper
        node.key = node.key[at:].copy()
        node.value = node.value[at:].copy()
        upper.children[child_key(node.key, self.page_size, node.namespace)] = node
        if self.trace.on:
            self.trace.emit(TreeSplit(node=node.id, upper=upper.id, at=at))
        return upper

    def _add_leaf(
        self, parent: TreeNode, key: Ids, value: Slots, namespace: str, rid: str, present: int
    ) -> None:
        leaf = self._new_node(parent, key, value, namespace)
        self._evictable += len(key)
        self._queue_if_leaf(leaf)
        if self.trace.on:
            self.trace.emit(
                TreeInserted(
                    rid=rid,
                    node=leaf.id,
                    parent=parent.id,
                    slots=as_bytes(value),
                    present=present,
                    token_ids=as_bytes(key),
                )
            )

    def _queue_if_leaf(self, node: TreeNode) -> None:
        if not node.children and not node.queued and not node.is_root:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def _pop_leaf(self) -> TreeNode | None:
        """The least recently used unlocked leaf, taken off the heap; None when all is locked."""
        while self._heap:
            access, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.lock_ref or node.children:
                continue  # it is queued again when it becomes an unlocked leaf
            if access == node.last_access:
                return node
            self._queue_if_leaf(node)
        return None

    def _drop(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[child_key(node.key, self.page_size, node.namespace)]
        node.parent = None
        self._nodes -= 1
        self.changes += 1
        self._evictable -= len(node.key)
        if parent.lock_ref == 0:
            self._queue_if_leaf(parent)
        if self.trace.on:
            self.trace.emit(TreeEvicted(node=node.id, tokens=len(node.key), last_access=node.last_access))

    # ------------------------------------------------------------ telling

    def _tell_lock(self, node: TreeNode, rid: str | None, delta: int, tokens: int) -> None:
        if rid is not None and self.trace.on and not node.is_root:
            self.trace.emit(TreeLocked(rid=rid, node=node.id, delta=delta, tokens=tokens))


def _up(node: TreeNode) -> Iterator[TreeNode]:
    """`node` and its ancestors without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
