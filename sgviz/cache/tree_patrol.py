"""TreePatrol: walks the radix tree when there is time, after it has changed, a bounded piece at a time.

Mirrors SGLang's sanity check of the tree at idle, which walks all of it. Imports: cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sgviz.cache.radix_cache import RadixCache
from sgviz.cache.radix_check import check_node
from sgviz.cache.tree_node import TreeNode

MOST_NODES = 500  # of one look: about ten milliseconds


class TreePatrol:
    """`look` at every idle.

    A tree of at most `most` nodes is checked whole, sums and all. Of a larger one each look takes the next piece,
    node by node; the walk begins anew when it is through and the tree has changed since it began.
    """

    def __init__(self, tree: RadixCache, most: int = MOST_NODES) -> None:
        self._tree = tree
        self._most = most
        self._seen = tree.changes
        self._walk: Iterator[TreeNode] | None = None

    def look(self) -> int:
        """Check what is due; returns how many nodes that were. Raises CacheCorrupt."""
        tree = self._tree
        if tree.num_nodes <= self._most:
            self._walk = None
            if tree.changes == self._seen:
                return 0
            self._seen = tree.changes
            tree.check()
            return tree.num_nodes
        if self._walk is None:
            if tree.changes == self._seen:
                return 0
            self._seen, self._walk = tree.changes, tree.nodes()
        return self._go_on(self._walk)

    def _go_on(self, walk: Iterator[TreeNode]) -> int:
        piece = list(islice(walk, self._most))
        if len(piece) < self._most:
            self._walk = None
        for node in piece:
            if node.attached:  # it may have been evicted since the walk came by its parent
                check_node(node, self._tree.page_size)
        return len(piece)
