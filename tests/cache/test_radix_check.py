"""The sanity walk: each broken invariant of the tree is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_tools import put, silent

from sgviz.cache.errors import CacheCorrupt
from sgviz.cache.radix_cache import RadixCache, TreeNode


def two_leaves() -> tuple[RadixCache, TreeNode, TreeNode]:
    tree = RadixCache(2, silent())
    put(tree, [1, 2, 3, 4], 2)
    put(tree, [1, 2, 5, 6], 12)
    upper = tree.match([1, 2]).node
    return tree, upper, tree.match([1, 2, 5, 6]).node


def spoil_value(_: TreeNode, leaf: TreeNode) -> None:
    leaf.value = leaf.value + 1


def spoil_owner(upper: TreeNode, leaf: TreeNode) -> None:
    leaf.value = upper.value.copy()


def spoil_key(_: TreeNode, leaf: TreeNode) -> None:
    leaf.key = leaf.key + 1


def spoil_lock(_: TreeNode, leaf: TreeNode) -> None:
    leaf.lock_ref = 1


def spoil_counter(upper: TreeNode, leaf: TreeNode) -> None:
    upper.lock_ref = leaf.lock_ref = 1


def spoil_queue(_: TreeNode, leaf: TreeNode) -> None:
    leaf.queued = False


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (spoil_value, "whole pages"),
        (spoil_owner, "slot 2 is in the tree twice"),
        (spoil_key, "namespace and first page"),
        (spoil_lock, "lock_ref 1 below 0"),
        (spoil_counter, "its counters say 6 and 0"),
        (spoil_queue, "eviction does not know"),
    ],
)
def test_the_check_finds_what_is_broken(spoil: Callable[[TreeNode, TreeNode], None], what: str) -> None:
    tree, upper, leaf = two_leaves()
    tree.check()
    spoil(upper, leaf)
    with pytest.raises(CacheCorrupt, match=what):
        tree.check()
