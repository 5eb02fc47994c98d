"""The engine's true state next to what the readers say of the same moment."""

from __future__ import annotations

from dataclasses import dataclass

from rig import Rig

from sgviz.recording import Moment


@dataclass(frozen=True)
class Truth:
    """Copied from the engine at a stop; nothing in it comes from events."""

    count: int
    waiting: tuple[str, ...]
    running: frozenset[str]
    chunked: str
    in_flight: int
    ledger: tuple[int, ...]
    private: dict[str, int]
    rows: dict[str, int]
    tree: dict[int, tuple[int, bytes, int]]

    @classmethod
    def of(cls, rig: Rig) -> Truth:
        state = rig.state
        waiting = tuple(req.rid for req in state.waiting_queue)
        chunked = state.chunked_req.rid if state.chunked_req is not None else ""
        return cls(
            count=rig.ring.total,
            waiting=waiting,
            running=frozenset(state.live) - set(waiting) - {chunked},
            chunked=chunked,
            in_flight=state.pending_results,
            ledger=tuple(state.cache.ledger())[:4],
            private=_private(rig),
            rows={req.rid: req.kv.req_pool_idx for req in rig.holders() if req.kv.req_pool_idx},
            tree={
                node.id: (
                    node.parent.id if node.parent else 0,
                    node.key.astype("<i4").tobytes(),
                    node.lock_ref,
                )
                for node in state.cache.tree.nodes()
            },
        )

    def compare(self, said: Moment) -> None:
        """AssertionError where the readers are wrong."""
        assert said.waiting == self.waiting
        assert frozenset(said.running) == self.running
        assert said.chunked == self.chunked
        assert (said.free, said.evictable, said.protected, said.private_total) == self.ledger
        assert said.private == self.private
        assert said.rows == self.rows
        assert {node.node: (node.parent, node.token_ids, node.locks) for node in said.tree} == self.tree
        assert all(node.locks == len(node.owners) for node in said.tree)
        assert len(said.in_flight) in (self.in_flight, self.in_flight + 1)  # planned and not launched


def _private(rig: Rig) -> dict[str, int]:
    page = rig.state.cache.page_size
    held = {
        req.rid: -(-(req.kv.allocated - req.kv.protected) // page) * page
        for req in rig.holders()
        if req.kv.req_pool_idx
    }
    return {rid: tokens for rid, tokens in held.items() if tokens}
