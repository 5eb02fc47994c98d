"""How many KV tokens a decode server may promise to prompts that are to come. Mirrors facts 12.3, step 2.

For each request that runs or arrives `num_reserved_decode_tokens` stay free (or what it can still ask for, if that is
less: a small pool would else take nobody), and enough that the longest running one could end alone.
Imports: batch, scheduler.
"""

from __future__ import annotations

from sgviz.batch.req import Req
from sgviz.scheduler.prefill_adder import CLIP_MAX_NEW_TOKENS_ESTIMATION, remaining_output
from sgviz.scheduler.state import SchedulerState


class DecodeBudget:
    """Of one decode server."""

    def __init__(self, state: SchedulerState, reserved_tokens: int) -> None:
        self._state = state
        self._reserved_tokens = reserved_tokens

    def reserve(self, req: Req) -> int:
        """KV tokens kept for what `req` is going to decode."""
        return min(self._reserved_tokens, remaining_output(req))

    def have(self) -> int:
        """KV tokens that nobody may count on; may be negative."""
        state = self._state
        kept = sum(self.reserve(req) for req in state.live.values() if req.kv.req_pool_idx)
        longest = max((_to_the_end(req) for req in state.running_batch.reqs), default=0)
        return state.cache.room() - max(kept, longest - self._running_tokens())

    def need(self, req: Req, tokens: int, cached: int = 0) -> int:
        """KV tokens that must be there for `tokens` positions of `req`, of which `cached` are in the tree."""
        page = self._state.cache.page_size
        now = -(-tokens // page) * page - cached + self.reserve(req)
        return max(now, _to_the_end(req) - cached - self._running_tokens())

    def _running_tokens(self) -> int:
        return sum(req.seqlen for req in self._state.running_batch.reqs)


def _to_the_end(req: Req) -> int:
    return len(req.origin_input_ids) + min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS_ESTIMATION)
