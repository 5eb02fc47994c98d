"""KV of retracted requests in host memory, and the way back. Mirrors SGLang's decode-side KV offload on retraction.

The copy out runs on the worker's stream behind the forwards under way, so the pages are free for later ones at once.
Host memory takes as many tokens as the pool has, or `disaggregation_decode_kept_tokens`; who finds no place is computed
again, as everybody is with `disaggregation_decode_retraction` recompute.
Imports: batch, disaggregation (protocol), worker protocol, scheduler.
"""

from __future__ import annotations

from sgviz.batch.req import Req
from sgviz.batch.transfer import Copy, KeptKv
from sgviz.disaggregation.protocol import KVPoll
from sgviz.scheduler.state import SchedulerState
from sgviz.worker.protocol import MovesKV


class Restore:
    """A copy back into the pool, polled as a receiver is."""

    def __init__(self, data: bytearray, copy: Copy) -> None:
        self.failure = ""
        self.failure_status = 500
        self._data: bytearray | None = data  # lives as long as the copy
        self._copy = copy

    def poll(self) -> KVPoll:
        if self.failure:
            return KVPoll.FAILED
        return KVPoll.SUCCESS if self._settled() and not self.failure else KVPoll.TRANSFERRING

    @property
    def busy(self) -> bool:
        return not self._settled()

    def abort(self, why: str, status: int = 500) -> None:
        self.failure = self.failure or why

    def _settled(self) -> bool:
        if self._data is None:
            return True
        if not self._copy.done():
            return False
        self._data = None
        try:
            self._copy.result()
        except Exception as error:
            self.failure = self.failure or f"its KV could not be copied back: {type(error).__name__}: {error}"
        return True


class Keeper:
    """Moves KV between a worker's pool and host memory.

    Args:
        most_tokens: of all requests together that host memory takes.
    """

    def __init__(self, state: SchedulerState, worker: MovesKV, most_tokens: int) -> None:
        self._state = state
        self._worker = worker
        self._most_tokens = most_tokens

    def keep(self, req: Req) -> None:
        """Begin to copy what `req`, about to be retracted, has computed: all but its newest token.

        Nothing if there is no place for it: then it will be computed again.
        """
        tokens = req.committed_len
        if tokens <= 0 or not req.output_ids or self._kept_tokens() + tokens > self._most_tokens:
            return
        data = bytearray(tokens * self._worker.kv_layout.wire_bytes)
        slots = self._state.cache.row_slots(req)[:tokens]
        req.kept_kv = KeptKv(tokens, data, self._worker.read_kv(slots, memoryview(data)))

    def _kept_tokens(self) -> int:
        return sum(req.kept_kv.tokens for req in self._state.live.values() if req.kept_kv is not None)

    def restore(self, req: Req, kept: KeptKv) -> None:
        """Take row and pages, and begin to copy back. Raises what the copy out raised; nothing is taken then."""
        kept.copy.result()
        self._state.cache.alloc_extend([req], [kept.tokens])
        req.kept_kv = None
        slots = self._state.cache.row_slots(req)
        req.transfer = Restore(kept.data, self._worker.write_kv(slots, memoryview(kept.data)))


def recompute_kept(state: SchedulerState) -> None:
    """Drop all KV in host memory: those requests are prefilled again."""
    for req in state.disagg.retracted:
        req.kept_kv = None
        state.enqueue(req)
    state.disagg.retracted.clear()
