"""The books at idle: every KV token is free or in the unlocked tree, every row is free (facts 5.14).

Cheap enough for every turn to idle: counters only. The thorough walks are `KVCache.check` and the tests.
Imports: cache.
"""

from __future__ import annotations

from sgviz.errors import SgvizError
from sgviz.scheduler.state import SchedulerState


class LeakError(SgvizError):
    """KV tokens or rows are missing although no request is alive."""


def check_idle(state: SchedulerState) -> None:
    """Raise LeakError with all numbers if something is still held."""
    ledger = state.cache.ledger()
    pool = state.cache.req_to_token_pool
    if not ledger.balanced or ledger.protected or ledger.private:
        raise LeakError(f"idle, but the KV books do not balance: {ledger}")
    if pool.available_size() != pool.size:
        raise LeakError(f"idle, but only {pool.available_size()} of {pool.size} rows are free")
