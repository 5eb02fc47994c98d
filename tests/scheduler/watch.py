"""Folds a rig's events as the reading wing does and compares with the scheduler's own state."""

from __future__ import annotations

from collections.abc import Sequence

from rig import Rig

from sgviz.events import Event, schema
from sgviz.recording.fold import State
from sgviz.recording.requests import PhaseName


class FoldWatch:
    """What a reader knows of a rig from its events alone."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.state = State()
        cache, limits = rig.state.cache, rig.state.limits
        self.state.ledger.configure(
            schema.EngineConfigured(
                settings={},
                model="mock",
                max_total_num_tokens=cache.total,
                page_size=cache.page_size,
                max_running_requests=limits.max_running_requests,
                context_len=rig.worker.info.context_len,
                rows=cache.req_to_token_pool.size,
            )
        )
        rig.ring.subscribe(self._follow)

    def _follow(self, events: Sequence[Event]) -> None:
        for event in events:
            self.state.apply(event)

    def compare(self) -> None:
        """Raise AssertionError where the fold and the truth differ."""
        folded, true = self.state.ledger, self._rig.state.cache.ledger()
        assert not self.state.differences, self.state.differences[:3]
        assert not self.state.missing and not self.state.dropped
        assert (folded.free, folded.evictable, folded.protected, folded.private_total) == true[:4]
        assert folded.private == self._private()
        assert sorted(self._queued()) == sorted(req.rid for req in self._rig.state.waiting_queue)

    def _private(self) -> dict[str, int]:
        """Tokens by rid, in whole pages, that are not the tree's."""
        page = self._rig.state.cache.page_size
        private = {
            req.rid: -(-(req.kv.allocated - req.kv.protected) // page) * page
            for req in self._rig.holders()
            if req.kv.req_pool_idx
        }
        return {rid: tokens for rid, tokens in private.items() if tokens}

    def _queued(self) -> list[str]:
        states = self.state.requests.by_rid.items()
        return [rid for rid, request in states if request.phase is PhaseName.QUEUE and not request.end]
