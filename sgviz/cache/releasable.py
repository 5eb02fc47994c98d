"""Releasable: how much room some requests would make if they gave up what they hold, counted one by one.

SGLang adds up the tokens of its victims as if nobody shared anything. Imports: cache.
"""

from __future__ import annotations

from sgviz.cache.req_kv import NO_ROW, HoldsKv


class Releasable:
    """The room, in tokens, that the requests added so far would make; holds only while nothing is taken or freed.

    A tree node counts once all who have locked it are among them.
    """

    def __init__(self, page_size: int) -> None:
        self.tokens = 0
        self._page_size = page_size
        self._locks: dict[int, int] = {}

    def add(self, req: HoldsKv) -> None:
        self.tokens += self._private(req)
        for node in req.kv.node.path() if req.kv.node is not None else ():
            count = self._locks[node.id] = self._locks.get(node.id, 0) + 1
            self.tokens += len(node.key) if count == node.lock_ref else 0

    def remove(self, req: HoldsKv) -> None:
        """Undo `add`."""
        self.tokens -= self._private(req)
        for node in req.kv.node.path() if req.kv.node is not None else ():
            self.tokens -= len(node.key) if self._locks[node.id] == node.lock_ref else 0
            self._locks[node.id] -= 1

    def _private(self, req: HoldsKv) -> int:
        kv = req.kv
        if kv.req_pool_idx == NO_ROW:
            return 0
        return -(-(kv.allocated - kv.protected) // self._page_size) * self._page_size
