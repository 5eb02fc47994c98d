"""TreeNode: one edge of the radix tree, and what a match answers. Imports: numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgviz.cache.req_kv import Slots

Ids = npt.NDArray[np.int32]
ChildKey = tuple[str, bytes]  # namespace and the bytes of the first page of ids


@dataclass(slots=True, eq=False)
class TreeNode:
    """One edge of the tree with its end; identity is the object, `id` its name in events.

    Attributes:
        id: consecutive, never used again; the root is 0.
        parent: None for the root and for a node that has left the tree.
        key, value: [n] token ids of the edge and the slots that hold their KV.
        lock_ref: how many requests hold this node or one below it; the root starts with 1.
        last_access: logical step of the last match or insert that came through.
        hit_count: requests that were admitted with it as a part of their cached prefix.
        queued: it has an entry in the eviction heap.
    """

    id: int
    parent: TreeNode | None
    key: Ids
    value: Slots
    namespace: str = ""
    children: dict[ChildKey, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: int = 0
    hit_count: int = 0
    queued: bool = False

    @property
    def is_root(self) -> bool:
        return self.id == 0

    @property
    def attached(self) -> bool:
        """Still in the tree. Ancestors of an attached node are attached, as eviction starts at leaves."""
        return self.parent is not None or self.is_root

    def path(self) -> list[TreeNode]:
        """The nodes from below the root down to this one."""
        nodes: list[TreeNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Match(NamedTuple):
    """`length` tokens are cached in `slots` [length]; `node` is where they end."""

    length: int
    slots: Slots
    node: TreeNode


def child_key(ids: Ids, page_size: int, namespace: str) -> ChildKey:
    """Under which key a node finds the child whose edge begins with `ids`."""
    return namespace, ids[:page_size].tobytes()


def as_ids(ids: Sequence[int] | Ids) -> Ids:
    return np.asarray(ids, dtype=np.int32)


def as_bytes(values: Slots | Ids) -> bytes:
    """Little-endian int32, the form in which events carry slots and ids."""
    return values.astype("<i4").tobytes()
