"""The sanity walk of the radix tree: every invariant, by name. Imports: numpy, cache.errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgviz.cache.errors import CacheCorrupt
from sgviz.cache.req_kv import no_slots
from sgviz.cache.tree_node import TreeNode, child_key


def check_tree(
    root: TreeNode, nodes: Sequence[TreeNode], page_size: int, evictable: int, protected: int
) -> None:
    """Compare the tree with its own rules and with its two counters.

    Raises:
        CacheCorrupt: names the invariant that is broken and the node.
    """
    if root.lock_ref != 1 or len({node.id for node in nodes} | {0}) != len(nodes) + 1:
        raise CacheCorrupt(f"the root has lock_ref {root.lock_ref} (1 is right), or two nodes share an id")
    for node in nodes:
        check_node(node, page_size)
    unlocked = sum(len(node.key) for node in nodes if node.lock_ref == 0)
    locked = sum(len(node.key) for node in nodes if node.lock_ref)
    if (unlocked, locked) != (evictable, protected):
        raise CacheCorrupt(
            f"the tree holds {unlocked} evictable and {locked} protected tokens, "
            f"its counters say {evictable} and {protected}"
        )
    slots, counts = np.unique(
        np.concatenate([no_slots(), *(node.value for node in nodes)]), return_counts=True
    )
    if (counts > 1).any():
        raise CacheCorrupt(f"slot {slots[counts > 1][0]} is in the tree twice")


def check_node(node: TreeNode, page_size: int) -> None:
    """What must hold of one node and its parent. Raises CacheCorrupt."""
    _check_shape(node, page_size)
    _check_order(node)


def _check_shape(node: TreeNode, page: int) -> None:
    _require(len(node.key) == len(node.value), node, f"{len(node.key)} ids but {len(node.value)} slots")
    _require(len(node.key) > 0 and len(node.key) % page == 0, node, f"{len(node.key)} tokens, page {page}")
    places = node.value.reshape(-1, page)
    whole = (places == places[:, :1] + np.arange(page)).all() and (places[:, 0] % page == 0).all()
    _require(bool(whole), node, "its slots are not whole pages")
    known = node.parent is not None and node.parent.children.get(child_key(node.key, page, node.namespace))
    _require(known is node, node, "its parent does not have it under its namespace and first page")


def _check_order(node: TreeNode) -> None:
    parent = node.parent
    _require(node.lock_ref >= 0, node, f"lock_ref {node.lock_ref}")
    if parent is not None and not parent.is_root:
        _require(
            parent.namespace == node.namespace,
            node,
            f"namespace {node.namespace!r} below {parent.namespace!r}",
        )
        _require(parent.lock_ref >= node.lock_ref, node, f"lock_ref {node.lock_ref} below {parent.lock_ref}")
        _require(parent.last_access >= node.last_access, node, "it was used after its parent")
    if node.lock_ref == 0 and not node.children:
        _require(node.queued, node, "it is an unlocked leaf that eviction does not know")


def _require(holds: bool, node: TreeNode, what: str) -> None:
    if not holds:
        raise CacheCorrupt(f"tree node {node.id}: {what}")
