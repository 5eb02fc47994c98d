"""A transfer in which nothing travels and nobody waits: for warm-up and health checks, as SGLang's fake backend.

Imports: disaggregation.protocol.
"""

from __future__ import annotations

from sgviz.cache.req_kv import Slots
from sgviz.disaggregation.protocol import KVAux, KVPoll, TransferStats

FAKE_TOKEN = 0  # what the prefill side would have sampled


class FakeTransfer:
    """A sender and a receiver in one; SUCCESS once it has been sent the last piece, or told where it goes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.decode_prefix_len = 0
        self.prefill_dp_rank = 0
        self.failure = ""
        self.failure_status = 500
        self.stats = TransferStats(backend="fake")
        self.aux: KVAux | None = None
        self.busy = False
        self._state = KVPoll.WAITING_FOR_INPUT

    def poll(self) -> KVPoll:
        return self._state

    def send(self, start: int, slots: Slots, *, aux: KVAux | None = None, cached: bool = False) -> None:
        if aux is not None and self._state is not KVPoll.FAILED:
            self._state = KVPoll.SUCCESS

    def init(self, slots: Slots, prefix_len: int) -> None:
        if self._state is not KVPoll.FAILED:
            self.aux = KVAux(room=self.room, first_token=FAKE_TOKEN)
            self._state = KVPoll.SUCCESS

    def abort(self, why: str, status: int = 500) -> None:
        if self._state is not KVPoll.SUCCESS:
            self.failure, self.failure_status, self._state = why, status, KVPoll.FAILED
