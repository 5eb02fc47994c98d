"""The radix tree, by examples and against a naive oracle: a table of page-aligned prefixes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import pytest
from cache_tools import Choose, case_of, drawn, listening, put, silent, some_ids
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgviz.cache.errors import CacheMisuse
from sgviz.cache.radix_cache import RadixCache, TreeNode
from sgviz.events.schema import AnyBody, TreeEvicted, TreeInserted, TreeLocked, TreeSplit


def size(tree: RadixCache) -> int:
    return tree.evictable_size() + tree.protected_size()


def test_worked_example_page_1() -> None:
    """Worked example 6 of the facts."""
    tree = RadixCache(1, silent())
    assert put(tree, [1, 2, 3, 4], 10) == 0
    found = tree.match([1, 2, 5])
    assert found.length == 2 and found.slots.tolist() == [10, 11]
    (upper,) = tree.root.children.values()
    (lower,) = upper.children.values()
    assert upper is found.node and upper.key.tolist() == [1, 2] and lower.key.tolist() == [3, 4]
    assert put(tree, [1, 2, 5, 6], 20) == 2
    assert size(tree) == 6
    assert tree.match([1, 2, 5, 6]).slots.tolist() == [10, 11, 22, 23]
    tree.check()


def test_worked_example_page_2() -> None:
    tree = RadixCache(2, silent())
    put(tree, [1, 2, 3, 4], 10)
    assert tree.match([1, 2, 3, 9]).length == 2
    other = RadixCache(2, silent())
    put(other, [1, 2, 3, 4, 5], 10)
    assert size(other) == 4
    other.check()


def test_peek_finds_the_same_and_changes_nothing() -> None:
    trace, sink = listening()
    tree = RadixCache(2, trace)
    put(tree, [1, 2, 3, 4], 2)
    put(tree, [9, 9], 8)
    sink.drain()
    assert tree.peek([1, 2, 3, 9]) == 2 and tree.peek([9, 9, 9]) == 2 and tree.peek([8, 8]) == 0
    assert tree.peek_path([1, 2, 3, 9]) == (1,) and tree.peek_path([8, 8]) == ()
    assert sink.drain() == [] and len(list(tree.nodes())) == 2
    assert tree.evict(1).tolist() == [2, 3, 4, 5], "the one looked at is still the oldest"


def test_namespaces_share_nothing() -> None:
    tree = RadixCache(1, silent())
    put(tree, [1, 2, 3], 1, "a")
    assert tree.match([1, 2, 3], "b").length == 0 and tree.peek([1, 2, 3], "") == 0
    assert put(tree, [1, 2, 3], 11, "b") == 0
    assert tree.match([1, 2, 3], "a").slots.tolist() == [1, 2, 3]
    assert tree.match([1, 2, 3], "b").slots.tolist() == [11, 12, 13]
    tree.check()


def test_a_parent_becomes_a_candidate_when_its_last_child_goes() -> None:
    tree = RadixCache(1, silent())
    put(tree, [1, 2, 3], 1)
    put(tree, [1, 2, 4], 11)
    assert tree.evict(1).tolist() == [3]
    assert tree.evict(1).tolist() == [13]
    assert tree.evict(99).tolist() == [1, 2]
    assert tree.evict(1).tolist() == [] and size(tree) == 0
    tree.check()


def test_eviction_takes_the_least_recently_used_and_spares_locked_paths() -> None:
    tree = RadixCache(1, silent())
    for first, token in ((10, 1), (20, 2), (30, 3)):
        put(tree, [token, 9], first)
    tree.match([1, 9])
    held = tree.match([2]).node
    tree.inc_lock_ref(held)
    assert tree.evict(1).tolist() == [21], "the tail of 2 was not used since, its head is locked"
    assert tree.evict(1).tolist() == [30, 31]
    assert tree.evict(1).tolist() == [10, 11]
    assert tree.evict(1).tolist() == [] and tree.protected_size() == 1
    tree.dec_lock_ref(held)
    assert tree.evict(1).tolist() == [20]


def test_a_split_under_a_lock_keeps_the_lock_on_both_parts() -> None:
    tree = RadixCache(1, silent())
    put(tree, [1, 2, 3, 4], 1)
    node = tree.match([1, 2, 3, 4]).node
    assert tree.inc_lock_ref(node) == 4
    tree.match([1, 2])
    assert tree.protected_size() == 4 and tree.evict(9).tolist() == []
    assert tree.dec_lock_ref(node) == 4
    assert tree.root.lock_ref == 1
    tree.check()


def test_an_unlocked_node_cannot_be_unlocked() -> None:
    tree = RadixCache(1, silent())
    put(tree, [1], 1)
    with pytest.raises(CacheMisuse, match="node 1"):
        tree.dec_lock_ref(tree.match([1]).node)


def test_the_stored_arrays_do_not_follow_those_of_the_caller() -> None:
    tree = RadixCache(1, silent())
    ids, slots = np.array([1, 2], dtype=np.int32), np.array([5, 6], dtype=np.int64)
    tree.insert(ids, slots)
    ids[:] = 7
    slots[:] = 7
    assert tree.match([1, 2]).slots.tolist() == [5, 6]


def test_events_tell_the_story() -> None:
    trace, sink = listening()
    tree = RadixCache(1, trace)
    put(tree, [1, 2, 3], 1)
    node = tree.match([1, 2]).node
    tree.inc_lock_ref(node, "r")
    tree.dec_lock_ref(node, "r")
    tree.inc_lock_ref(node)
    tree.dec_lock_ref(node)
    tree.evict(1)
    inserted, split, locked, unlocked, evicted = sink.drain()
    assert isinstance(inserted, TreeInserted) and (inserted.node, inserted.parent, inserted.present) == (
        1,
        0,
        0,
    )
    assert np.frombuffer(inserted.token_ids, "<i4").tolist() == [1, 2, 3]
    assert split == TreeSplit(node=1, upper=2, at=2)
    assert locked == TreeLocked(rid="r", node=2, delta=1, tokens=2)
    assert unlocked == TreeLocked(rid="r", node=2, delta=-1, tokens=2)
    assert evicted == TreeEvicted(node=1, tokens=1, last_access=1)


@dataclass
class Page:
    """The oracle's entry for one page-aligned prefix."""

    slot: int
    used: int
    locks: int = 0


Prefix = tuple[str, tuple[int, ...]]


class RadixWorld:
    """Every page-aligned prefix has an entry in a table; the tree must say the same as the table."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        trace, self.sink = listening()
        self.tree = RadixCache(page_size, trace)
        self.table: dict[Prefix, Page] = {}
        self.locks: list[tuple[TreeNode, list[Prefix]]] = []
        self.next_slot = page_size
        self.step = 0
        self.seen: Counter[type] = Counter()

    def prefixes(self, ids: list[int], namespace: str) -> list[Prefix]:
        """All page-aligned prefixes of `ids`, shortest first."""
        page = self.page_size
        return [(namespace, tuple(ids[:end])) for end in range(page, len(ids) + 1, page)]

    def known(self, ids: list[int], namespace: str) -> list[Prefix]:
        return list(takewhile(self.table.__contains__, self.prefixes(ids, namespace)))

    def use(self, prefixes: list[Prefix]) -> None:
        self.step += 1
        for prefix in prefixes:
            self.table[prefix].used = self.step

    def draw(self, choose: Choose) -> tuple[list[int], str]:
        ids = some_ids(choose, self.page_size, choose(6), choose(self.page_size))
        return ids, "x" if choose(4) == 0 else ""

    def insert(self, choose: Choose) -> None:
        ids, namespace = self.draw(choose)
        known = self.known(ids, namespace)
        slots = np.arange(self.next_slot, self.next_slot + len(ids))
        assert self.tree.insert(ids, slots, namespace, "r") == len(known) * self.page_size
        for at, prefix in enumerate(self.prefixes(ids, namespace)):
            self.table.setdefault(prefix, Page(self.next_slot + at * self.page_size, 0))
        self.use(self.prefixes(ids, namespace))
        self.next_slot += (len(ids) // self.page_size + 1) * self.page_size

    def match(self, choose: Choose) -> None:
        ids, namespace = self.draw(choose)
        known = self.known(ids, namespace)
        assert self.tree.peek(ids, namespace) == len(known) * self.page_size
        found = self.tree.match(ids, namespace)
        self.use(known)
        assert found.length == len(found.slots) == len(known) * self.page_size
        assert found.slots[:: self.page_size].tolist() == [self.table[prefix].slot for prefix in known]
        assert self.tree.peek_path(ids, namespace) == tuple(node.id for node in found.node.path())
        if choose(2):
            moved = sum(self.table[prefix].locks == 0 for prefix in known) * self.page_size
            assert self.tree.inc_lock_ref(found.node, "r") == moved
            self.locks.append((found.node, known))
            self.shift(known, +1)

    def unlock(self, choose: Choose) -> None:
        if self.locks:
            node, known = self.locks.pop(choose(len(self.locks)))
            self.shift(known, -1)
            moved = sum(self.table[prefix].locks == 0 for prefix in known) * self.page_size
            assert self.tree.dec_lock_ref(node, "r") == moved

    def shift(self, prefixes: list[Prefix], delta: int) -> None:
        for prefix in prefixes:
            self.table[prefix].locks += delta

    def evict(self, choose: Choose) -> None:
        tokens, before = choose(6 * self.page_size), self.tree.evictable_size()
        self.look()
        freed = sorted(self.tree.evict(tokens)[:: self.page_size].tolist())
        sizes = [body.tokens for body in self.look() if isinstance(body, TreeEvicted)]
        assert sum(sizes) == len(freed) * self.page_size >= min(tokens, before)
        assert sum(sizes[:-1]) < max(tokens, 1), "one leaf less would have done"
        assert freed == sorted(self.oldest() for _ in freed), "not the least recently used"

    def oldest(self) -> int:
        """Drop the unlocked last page used longest ago from the table; returns its slot."""
        inner = {(namespace, ids[: -self.page_size]) for namespace, ids in self.table}
        last = [prefix for prefix, page in self.table.items() if prefix not in inner and not page.locks]
        return self.table.pop(min(last, key=lambda prefix: self.table[prefix].used)).slot

    def reset(self, choose: Choose) -> None:
        if not self.locks and choose(4) == 0:
            assert len(self.tree.reset()) == len(self.table) * self.page_size
            self.table.clear()

    def look(self) -> list[AnyBody]:
        bodies = self.sink.drain()
        self.seen.update(type(body) for body in bodies)
        return bodies

    def verify(self) -> None:
        self.look()
        self.tree.check()
        unlocked = sum(page.locks == 0 for page in self.table.values())
        assert self.tree.evictable_size() == unlocked * self.page_size
        assert self.tree.protected_size() == (len(self.table) - unlocked) * self.page_size


OPS: tuple[Callable[[RadixWorld, Choose], None], ...] = (
    *[RadixWorld.insert] * 4,
    *[RadixWorld.match] * 4,
    *[RadixWorld.unlock] * 2,
    *[RadixWorld.evict] * 2,
    RadixWorld.reset,
)


class RadixMachine(RuleBasedStateMachine):
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.world = RadixWorld(self.page_size)

    @rule(op=st.sampled_from(OPS), data=st.data())
    def step(self, op: Callable[[RadixWorld, Choose], None], data: st.DataObject) -> None:
        op(self.world, drawn(data))

    @invariant()
    def all_is_well(self) -> None:
        self.world.verify()


TestRadixPage1 = case_of(RadixMachine, 20, 40, page_size=1)
TestRadixPage2 = case_of(RadixMachine, 20, 40, page_size=2)
TestRadixPage4 = case_of(RadixMachine, 20, 40, page_size=4)
TestRadixPage16 = case_of(RadixMachine, 20, 40, page_size=16)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_long_walks_go_everywhere(page_size: int) -> None:
    """Long seeded histories, with many cuts, locks and evictions, where short examples seldom come."""
    seen: Counter[type] = Counter()
    for seed in range(6):
        rng = random.Random(seed)
        world = RadixWorld(page_size)
        for _ in range(400):
            rng.choice(OPS)(world, rng.randrange)
            world.verify()
        seen += world.seen
    assert min(seen[kind] for kind in (TreeInserted, TreeSplit, TreeLocked, TreeEvicted)) > 50, seen
