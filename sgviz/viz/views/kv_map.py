"""The KV map: every page of the pool a cell. Imports: recording, numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgviz.recording.ledger import Ledger
from sgviz.recording.moment import Moment
from sgviz.recording.page_map import FREE, GONE, TREE, PageMap
from sgviz.viz.views.models import KvMapView

STATES = ("free", "private", "evictable", "protected", "gone")
MAX_CELLS = 16_384  # more would be smaller than a pixel or two
FLASH_NS = 700_000_000
MAX_OWNERS = 256  # named one by one; the rest share the last number
REST = "others"

Ints = npt.NDArray[np.int32]


def kv_map(now: Moment, pages: PageMap, ledger: Ledger) -> KvMapView:
    """The map at a moment."""
    per_cell = max(1, -(-pages.pages // MAX_CELLS))
    owner, touched = _cells(pages, per_cell)
    state = _states(owner, locked_nodes(ledger))
    numbers, owners = _owners(owner, pages)
    age = _ages(touched, owner, now.iteration)
    return KvMapView(
        seq=now.count, t_ms=now.t_ms, page_size=pages.page_size, pages=pages.pages, pages_per_cell=per_cell,
        states=STATES, owners=owners, runs=_runs(state, numbers, age),
        flashes=tuple(
            (flash.why, tuple(np.unique((flash.pages[flash.pages > 0] - 1) // per_cell).tolist()))
            for flash in pages.flashes
            if now.t - FLASH_NS < flash.t <= now.t
        ),
        evicted=pages.evicted, retracted=pages.retracted, exact=now.exact and now.tree_exact,
    )  # fmt: skip


def locked_nodes(ledger: Ledger) -> set[int]:
    """The nodes that requests hold, those above them among them."""
    found: set[int] = set()
    for _, number in ledger.locks:
        at = number
        while at in ledger.nodes and at not in found:
            found.add(at)
            at = ledger.nodes[at].parent
    return found


def _cells(pages: PageMap, per_cell: int) -> tuple[Ints, Ints]:
    """Owner and last change by cell; of several pages the first in use stands for all."""
    owner, touched = pages.owner[1:], pages.touched[1:]
    if per_cell == 1:
        return owner, touched
    short = -len(owner) % per_cell
    grid = np.pad(owner, (0, short), constant_values=GONE).reshape(-1, per_cell)
    first = np.argmax((grid != FREE) & (grid != GONE), axis=1)
    rows = np.arange(len(grid))
    times = np.pad(touched, (0, short)).reshape(-1, per_cell)
    return grid[rows, first], times[rows, first]


def _states(owner: Ints, locked: set[int]) -> Ints:
    state = np.zeros(len(owner), np.int32)
    state[owner > 0] = 1
    state[owner <= TREE] = 2
    held = np.array(sorted(locked), np.int64)
    state[(owner <= TREE) & np.isin(TREE - owner.astype(np.int64), held)] = 3
    state[owner == GONE] = 4
    return state


def _owners(owner: Ints, pages: PageMap) -> tuple[Ints, tuple[tuple[str, int], ...]]:
    """A small number by cell, and who it is with the tokens held; 0: nobody."""
    found, inverse = np.unique(owner, return_inverse=True)
    small = np.zeros(len(found), np.int32)
    named: list[tuple[str, int]] = [("", 0)]
    for index, value in enumerate(found.tolist()):
        if value in (FREE, GONE):
            continue
        if len(named) < MAX_OWNERS:
            named.append(_named(value, pages))
        else:
            named[-1] = (REST, named[-1][1] + _named(value, pages)[1])
        small[index] = len(named) - 1
    return small[inverse], tuple(named)


def _named(value: int, pages: PageMap) -> tuple[str, int]:
    if value > 0:
        return pages.names.get(value, ""), pages.held.get(value, 0) * pages.page_size
    node = TREE - value
    return f"node {node}", len(pages.nodes.get(node, ())) * pages.page_size


def _ages(touched: Ints, owner: Ints, iteration: int) -> Ints:
    """0 to 7: the logarithm of the iterations since the page changed hands; free ones are old."""
    since = np.maximum(0, iteration - touched).astype(np.float64)
    age = np.minimum(7, np.log2(since + 1)).astype(np.int32)
    age[owner == FREE] = 7
    return age


def _runs(state: Ints, owner: Ints, age: Ints) -> tuple[int, ...]:
    if len(state) == 0:
        return ()
    change = (np.diff(state) != 0) | (np.diff(owner) != 0) | (np.diff(age) != 0)
    starts = np.concatenate(([0], np.flatnonzero(change) + 1))
    lengths = np.diff(np.concatenate((starts, [len(state)])))
    table = np.column_stack((lengths, state[starts], owner[starts], age[starts]))
    return tuple(table.ravel().tolist())
