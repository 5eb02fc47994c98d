"""Events of the KV memory. Slot lists are raw little-endian int32. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body

# ---------------------------------------------------------------- memory


class RowTaken(Body, frozen=True, tag="row.taken"):
    """The request owns row `row` of the ReqToTokenPool."""

    rid: str
    row: int


class RowReturned(Body, frozen=True, tag="row.returned"):
    """The request gave up row `row`; somebody else may take it."""

    rid: str
    row: int


class PoolTaken(Body, frozen=True, tag="pool.taken"):
    """KV slots went to requests: `counts[i]` of the `slots` to `rids[i]`, in order. `free` tokens remain."""

    rids: tuple[str, ...]
    counts: tuple[int, ...]
    slots: bytes
    free: int


class PoolReturned(Body, frozen=True, tag="pool.returned"):
    """KV slots came back. `why`: finish, tail, duplicate, evict, retract, abort, flush. `free` afterwards.

    A request (`rid`) gives back its private slots; `evict` and `flush` free slots of the tree (`rid` empty).
    """

    rid: str
    slots: bytes
    why: str
    free: int


class TreeInserted(Body, frozen=True, tag="tree.inserted"):
    """A new leaf `node` under `parent` took over `slots` from `rid`; `present` tokens before it were there already."""

    rid: str
    node: int
    parent: int
    slots: bytes
    present: int
    token_ids: bytes


class TreeSplit(Body, frozen=True, tag="tree.split"):
    """Node `node` was cut after `at` tokens: the new node `upper` holds the head, `node` keeps the rest."""

    node: int
    upper: int
    at: int


class TreeEvicted(Body, frozen=True, tag="tree.evicted"):
    """Leaf `node` with `tokens` tokens was dropped to make room; last used at logical step `last_access`."""

    node: int
    tokens: int
    last_access: int


class TreeLocked(Body, frozen=True, tag="tree.locked"):
    """`delta` +1 or -1 on `node` and its ancestors for `rid`; `tokens` moved into (or out of) protection."""

    rid: str
    node: int
    delta: int
    tokens: int
