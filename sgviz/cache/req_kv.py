"""What one request holds of the KV memory, and the face of a request that the cache works with.

Imports: numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sgviz.cache.radix_cache import TreeNode

Slots = npt.NDArray[np.int64]
NO_ROW = 0  # row 0 of the pool is padding, never a request's


def no_slots() -> Slots:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class ReqKvInfo:
    """A request's share of the pools.

    Attributes:
        req_pool_idx: its row of the ReqToTokenPool, NO_ROW when it has none.
        prefix: slots of the cached prefix, from admission until the row is written.
        allocated: positions [0, allocated) have a slot in the row (`kv_allocated_len`).
        protected: positions [0, protected) belong to the tree (`cache_protected_len`); the rest is private.
        node: the tree node it has locked, None when it has locked nothing.
    """

    req_pool_idx: int = NO_ROW
    prefix: Slots = field(default_factory=no_slots)
    allocated: int = 0
    protected: int = 0
    node: TreeNode | None = None


class HoldsKv(Protocol):
    """A request, as far as the cache knows it."""

    rid: str
    kv: ReqKvInfo

    @property
    def namespace(self) -> str:
        """Requests of different namespaces (`extra_key`) never share KV."""
        ...
