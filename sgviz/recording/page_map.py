"""Whose each page of the KV pool is, followed from the slots that events name: what the KV map draws.

The ledger counts tokens; this keeps the place of each. Mirrors what SGLang's allocator and radix tree hold between
them. Simplified: a page belongs to whoever took a slot of it last. Imports: events, recording, numpy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgviz.events.schema import (
    EngineConfigured,
    Event,
    LimitsChanged,
    PoolReturned,
    PoolTaken,
    TreeEvicted,
    TreeInserted,
    TreeSplit,
)

FREE, GONE = 0, -1
TREE = -2  # a page of node n is TREE - n; a page of a request is the request's number, from 1 on
SHOWN = frozenset({"evict", "retract"})
FLASHES = 64  # evictions and retractions remembered

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Flash:
    """Pages that came back at `t` (monotonic ns) because of an eviction or a retraction (`why`)."""

    t: int
    why: str
    pages: Pages


@dataclass(slots=True)
class PageMap:
    """The pool page by page. Page 0 is the engine's own and not shown.

    Attributes:
        owner: by page: FREE, GONE (retired by a debugger), a request's number, or TREE - node.
        touched: by page: the iteration in which it last changed hands.
        names: rid by number, of requests that ever took a page and still hold one.
        evicted, retracted: tokens (whole pages) that came back so, since the beginning.
    """

    page_size: int = 1
    owner: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    touched: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    names: dict[int, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, Pages] = field(default_factory=dict)
    flashes: deque[Flash] = field(default_factory=lambda: deque(maxlen=FLASHES))
    evicted: int = 0
    retracted: int = 0
    _next: int = 1

    def apply(self, event: Event) -> None:
        """Follow one event; those that move no slot change nothing."""
        body = event.body
        match body:
            case PoolTaken():
                self._take(body, event.iteration)
            case PoolReturned():
                self._return(body, event)
            case TreeInserted():
                self._insert(body, event.iteration)
            case TreeSplit():
                self._split(body)
            case TreeEvicted():
                self.nodes.pop(body.node, None)
            case EngineConfigured():
                self._configure(body)
            case LimitsChanged():
                self._own(self._pages(body.slots), GONE, event.iteration)
            case _:
                return

    def copy(self) -> PageMap:
        """The same map, which goes its own way from here."""
        return PageMap(
            self.page_size, self.owner.copy(), self.touched.copy(), dict(self.names), dict(self.numbers),
            dict(self.held), dict(self.nodes), self.flashes.copy(), self.evicted, self.retracted, self._next,
        )  # fmt: skip

    @property
    def pages(self) -> int:
        """Pages shown: all but page 0."""
        return max(0, len(self.owner) - 1)

    def _configure(self, body: EngineConfigured) -> None:
        self.page_size = max(1, body.page_size)
        count = body.max_total_num_tokens // self.page_size + 1
        self.owner, self.touched = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.names, self.numbers, self.held, self.nodes = {}, {}, {}, {}

    def _pages(self, slots: bytes) -> Pages:
        """The pages of these slots, in their order, each once."""
        pages = np.frombuffer(slots, dtype="<i4").astype(np.int64) // self.page_size
        if self.page_size > 1 and len(pages):
            _, first = np.unique(pages, return_index=True)
            pages = pages[np.sort(first)]
        if len(pages) and int(pages.max()) >= len(self.owner):  # the sizes were lost, or never told
            more = int(pages.max()) + 1 - len(self.owner)
            self.owner, self.touched = np.pad(self.owner, (0, more)), np.pad(self.touched, (0, more))
        return pages

    def _own(self, pages: Pages, owner: int, iteration: int) -> None:
        if len(pages) == 0:
            return
        before = self.owner[pages]
        for number in np.unique(before[before > 0]).tolist():
            self._lose(number, int((before == number).sum()))
        self.owner[pages], self.touched[pages] = owner, iteration
        if owner > 0:
            self.held[owner] = self.held.get(owner, 0) + len(pages)

    def _lose(self, number: int, pages: int) -> None:
        left = self.held.get(number, 0) - pages
        self.held[number] = left
        if left <= 0:
            del self.held[number]
            self.numbers.pop(self.names.pop(number, ""), None)

    def _number(self, rid: str) -> int:
        if rid not in self.numbers:
            self.numbers[rid], self.names[self._next] = self._next, rid
            self._next += 1
        return self.numbers[rid]

    def _take(self, body: PoolTaken, iteration: int) -> None:
        start = 0
        for rid, count in zip(body.rids, body.counts):
            pages = self._pages(body.slots[start * 4 : (start + count) * 4])
            start += count
            if count:
                mine = self.owner[pages] == self.numbers.get(rid, GONE)
                self._own(pages[~mine], self._number(rid), iteration)

    def _return(self, body: PoolReturned, event: Event) -> None:
        pages = self._pages(body.slots)
        self._own(pages, FREE, event.iteration)
        if body.why == "flush" and not body.rid:
            self.nodes = {}
        if body.why in SHOWN and len(pages):
            tokens = len(pages) * self.page_size
            self.evicted += tokens if body.why == "evict" else 0
            self.retracted += tokens if body.why == "retract" else 0
            self.flashes.append(Flash(event.t, body.why, pages))

    def _insert(self, body: TreeInserted, iteration: int) -> None:
        pages = self._pages(body.slots)
        self.nodes[body.node] = pages
        self._own(pages, TREE - body.node, iteration)

    def _split(self, body: TreeSplit) -> None:
        pages = self.nodes.get(body.node)
        if pages is None:
            return
        cut = body.at // self.page_size
        self.nodes[body.upper], self.nodes[body.node] = pages[:cut], pages[cut:]
        self.owner[pages[:cut]] = TREE - body.upper
