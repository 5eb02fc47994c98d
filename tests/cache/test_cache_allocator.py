"""The page allocator, by examples and against a naive model that walks token by token."""

from __future__ import annotations

import numpy as np
import pytest
from cache_tools import case_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgviz.cache.allocator import PagedTokenAllocator
from sgviz.cache.errors import CacheMisuse, InvalidFree
from sgviz.cache.req_kv import Slots
from sgviz.errors import ConfigError

PAGES = 12


def grow(allocator: PagedTokenAllocator, prefix: int, seq: int, last: int = 0) -> list[int]:
    slots = allocator.alloc_extend([prefix], [seq], [last])
    assert slots is not None
    return [int(slot) for slot in slots]


def test_slots_of_page_one_are_one_to_size() -> None:
    allocator = PagedTokenAllocator(4, 1)
    assert grow(allocator, 0, 4) == [1, 2, 3, 4]
    assert allocator.alloc_extend([0], [1], [0]) is None


def test_slots_of_larger_pages_leave_out_the_dummy_page() -> None:
    assert sorted(grow(PagedTokenAllocator(12, 4), 0, 12)) == list(range(4, 16))


def test_the_partly_used_page_is_filled_first_then_whole_pages_then_a_tail() -> None:
    allocator = PagedTokenAllocator(16, 4)
    first = grow(allocator, 0, 3)
    assert first == [4, 5, 6]
    rest = grow(allocator, 3, 10, first[-1])
    assert rest == [7, 8, 9, 10, 11, 12, 13]
    assert allocator.available_size() == 4


def test_page_need_of_a_decode_step() -> None:
    """Worked example 5 of the facts: at 32 tokens a page of 16 is needed, at 33 none."""
    allocator = PagedTokenAllocator(160, 16)
    assert allocator.pages_needed([32], [33]) * 16 == 16
    assert allocator.pages_needed([33], [34]) == 0


def test_decode_of_many_equals_growing_one_by_one() -> None:
    one, many = PagedTokenAllocator(400, 4), PagedTokenAllocator(400, 4)
    lengths = [1, 4, 6, 8, 11]
    last = [grow(one, 0, n)[-1] for n in lengths]
    assert [grow(many, 0, n)[-1] for n in lengths] == last
    together = many.alloc_extend(lengths, [n + 1 for n in lengths], last)
    assert together is not None
    assert together.tolist() == [grow(one, n, n + 1, slot)[0] for n, slot in zip(lengths, last, strict=True)]


def test_it_is_all_or_nothing() -> None:
    allocator = PagedTokenAllocator(8, 4)
    assert allocator.alloc_extend([0, 0], [4, 5], [0, 0]) is None
    assert allocator.available_size() == 8


@pytest.mark.parametrize("page_size", [1, 4])
def test_invalid_frees_name_the_slot_and_change_nothing(page_size: int) -> None:
    allocator = PagedTokenAllocator(8 * page_size, page_size)
    held = allocator.alloc_extend([0], [2 * page_size], [0])
    assert held is not None
    last = 9 * page_size - 1
    for slots, what in (
        ([page_size - 1], f"slot {page_size - 1} is not of this pool"),
        ([last + 1], f"slot {last + 1} is not of this pool"),
        ([last], f"slot {last} is free already"),
        ([int(held[0]), int(held[0])], f"slot {held[0]} is named twice"),
    ):
        with pytest.raises(InvalidFree, match=what):
            allocator.free(np.array(slots, dtype=np.int64))
        assert allocator.available_size() == 6 * page_size
    allocator.free(held)
    with pytest.raises(InvalidFree, match=f"slot {held[0]} is free already"):
        allocator.free(held)


@pytest.mark.parametrize(("size", "page_size"), [(10, 4), (0, 1), (4, 0), (2, 4)])
def test_sizes_that_are_not_whole_pages_are_refused(size: int, page_size: int) -> None:
    with pytest.raises(ConfigError):
        PagedTokenAllocator(size, page_size)


def test_lengths_that_make_no_sense_are_refused() -> None:
    allocator = PagedTokenAllocator(8, 4)
    with pytest.raises(CacheMisuse, match="shrink from 5 to 3"):
        allocator.alloc_extend([5], [3], [0])
    with pytest.raises(CacheMisuse, match="2 prefix lengths"):
        allocator.alloc_extend([5, 5], [6], [0])


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences grow and go; the model counts pages and checks every slot by hand."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PagedTokenAllocator(PAGES * self.page_size, self.page_size)
        self.held: list[list[int]] = []

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def extend(self, which: list[int], counts: list[int]) -> None:
        """Grow sequences; a fitting request must succeed, one that does not fit must change nothing."""
        prefix = [len(self.held[i]) for i in which]
        seq = [n + count for n, count in zip(prefix, counts, strict=True)]
        last = [self.held[i][-1] if self.held[i] else 0 for i in which]
        need = sum(self.pages_of(b) - self.pages_of(a) for a, b in zip(prefix, seq, strict=True))
        free = self.allocator.available_size()
        assert self.allocator.pages_needed(prefix, seq) == need
        slots = self.allocator.alloc_extend(prefix, seq, last)
        assert (slots is None) == (need * self.page_size > free)
        assert self.allocator.available_size() == free - (0 if slots is None else need * self.page_size)
        if slots is not None:
            self.hand_out(which, counts, slots)

    def hand_out(self, which: list[int], counts: list[int], slots: Slots) -> None:
        assert len(slots) == sum(counts)
        rest = [int(slot) for slot in slots]
        for i, count in zip(which, counts, strict=True):
            self.held[i] += rest[:count]
            rest = rest[count:]

    @rule(count=st.integers(0, 40))
    def start(self, count: int) -> None:
        self.held.append([])
        self.extend([len(self.held) - 1], [min(count, 3 * self.page_size + 1)])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow_some(self, data: st.DataObject) -> None:
        which = data.draw(st.lists(st.integers(0, len(self.held) - 1), unique=True, max_size=4))
        counts = [data.draw(st.integers(0, 2 * self.page_size + 1)) for _ in which]
        self.extend(which, counts)

    @precondition(lambda self: self.held)
    @rule()
    def decode_all(self) -> None:
        self.extend(list(range(len(self.held))), [1] * len(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        free = self.allocator.available_size()
        self.allocator.free(np.array(slots, dtype=np.int64))
        assert self.allocator.available_size() == free + self.pages_of(len(slots)) * self.page_size

    @invariant()
    def positions_lie_in_pages_in_order(self) -> None:
        page = self.page_size
        for slots in self.held:
            for position, slot in enumerate(slots):
                assert slot % page == position % page
                assert slot // page == slots[position - position % page] // page

    @invariant()
    def every_page_has_one_owner(self) -> None:
        page = self.page_size
        owned = [slot // page for slots in self.held for slot in slots[::page]]
        assert sorted([*owned, *self.allocator.free_pages().tolist()]) == list(range(1, PAGES + 1))


TestAllocatorPage1 = case_of(AllocatorMachine, 40, 40, page_size=1)
TestAllocatorPage2 = case_of(AllocatorMachine, 40, 40, page_size=2)
TestAllocatorPage4 = case_of(AllocatorMachine, 40, 40, page_size=4)
TestAllocatorPage16 = case_of(AllocatorMachine, 40, 40, page_size=16)
