"""The books at idle: every KV token is free or in the unlocked tree, every row is free, the tree is whole (facts 5.14).

Cheap enough for every turn to idle: counters, and of the tree a bounded piece if it has changed. The thorough audit
is `KVCache.check`. Imports: cache.
"""

from __future__ import annotations

from sgviz.cache.tree_patrol import TreePatrol
from sgviz.errors import SgvizError
from sgviz.scheduler.state import SchedulerState


class LeakError(SgvizError):
    """KV tokens or rows are missing although no request is alive."""


class SelfCheck:
    """Checks the memory of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._patrol = TreePatrol(state.cache.tree)

    def at_idle(self) -> None:
        """Raise LeakError with all numbers if something is still held, CacheCorrupt if the tree is broken."""
        cache = self._state.cache
        ledger, pool = cache.ledger(), cache.req_to_token_pool
        if not ledger.balanced or ledger.protected or ledger.private:
            raise LeakError(f"idle, but the KV books do not balance: {ledger}")
        if pool.available_size() != pool.size:
            raise LeakError(f"idle, but only {pool.available_size()} of {pool.size} rows are free")
        self._patrol.look()
