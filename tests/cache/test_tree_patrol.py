"""The look at the tree at idle: only after a change, never more than a piece, and nothing stays unseen."""

from __future__ import annotations

import pytest
from cache_tools import put, silent

from sgviz.cache.errors import CacheCorrupt
from sgviz.cache.radix_cache import RadixCache
from sgviz.cache.tree_patrol import TreePatrol


def grown(nodes: int, tree: RadixCache | None = None) -> RadixCache:
    """`nodes` more leaves below the root."""
    tree = tree or RadixCache(1, silent())
    first = tree.num_nodes + 1
    for i in range(first, first + nodes):
        put(tree, [i], i)
    return tree


def test_nothing_to_do_while_the_tree_stays_as_it_was() -> None:
    tree = grown(3)
    patrol = TreePatrol(tree)
    assert patrol.look() == 0
    grown(2, tree)
    assert [patrol.look() for _ in range(3)] == [5, 0, 0]
    tree.match([1])
    assert patrol.look() == 0
    tree.evict(1)
    assert [patrol.look() for _ in range(2)] == [4, 0]
    tree.reset()
    assert [patrol.look() for _ in range(2)] == [0, 0]


def test_a_cut_node_is_a_change() -> None:
    tree = RadixCache(1, silent())
    put(tree, [1, 2, 3], 1)
    patrol = TreePatrol(tree)
    tree.match([1, 2])
    assert patrol.look() == 2


def test_a_small_tree_is_checked_with_its_sums() -> None:
    tree = grown(3)
    patrol = TreePatrol(tree)
    grown(1, tree)
    tree._evictable += 1
    with pytest.raises(CacheCorrupt, match="its counters say 5 and 0"):
        patrol.look()


def test_a_large_tree_is_walked_in_pieces_and_no_more_than_once() -> None:
    tree = RadixCache(1, silent())
    patrol = TreePatrol(tree, most=4)
    grown(10, tree)
    assert [patrol.look() for _ in range(5)] == [4, 4, 2, 0, 0]
    tree.evict(1)
    assert sum(patrol.look() for _ in range(9)) == 9


@pytest.mark.parametrize("at", range(1, 11))
def test_a_broken_node_of_a_large_tree_is_found_wherever_it_is(at: int) -> None:
    tree = RadixCache(1, silent())
    patrol = TreePatrol(tree, most=4)
    grown(10, tree)
    node = tree.match([at]).node
    node.queued = False
    with pytest.raises(CacheCorrupt, match=f"tree node {node.id}: it is an unlocked leaf"):
        for _ in range(3):
            patrol.look()


def test_a_tree_that_changes_under_the_walk_is_no_error() -> None:
    tree = RadixCache(1, silent())
    patrol = TreePatrol(tree, most=3)
    grown(12, tree)
    looked = [patrol.look()]
    while tree.num_nodes:
        tree.evict(2)
        looked.append(patrol.look())
    tree.check()
    assert looked[0] == 3 and max(looked) <= 3
    grown(12, tree)
    assert sum(patrol.look() for _ in range(8)) >= 12
