"""Grown: the items that a list has now, while it goes on growing. Imports: nothing of sgviz."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class Grown(Sequence[T]):
    """The first items of a list that is only ever appended to, as many as it has when this is made; no copy.

    A stream that shows the last few of n items at each of n steps costs n in all, where copies would cost n squared.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._length = len(items)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return self._items[start:stop]
            return [self._items[place] for place in range(start, stop, step)]
        return self._items[range(self._length)[index]]

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._length)
