"""The queues that a prefill or decode server has beside the waiting queue, and pages that a copy still uses.

Imports: batch, cache.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from sgviz.batch.req import Req
from sgviz.batch.transfer import Transfer
from sgviz.cache.req_kv import ReqKvInfo


@dataclass(slots=True, eq=False)
class Draining:
    """What a request that has ended (or went back to a queue) held; `transfer` still copies from or into it."""

    rid: str
    namespace: str
    kv: ReqKvInfo
    transfer: Transfer
    why: str


@dataclass(slots=True)
class DisaggQueues:
    """All empty on a server that does both.

    Attributes:
        bootstrap: (prefill) the decode side has not told yet where the KV goes; (decode) the prefill side is not found
            yet. They hold nothing.
        inflight: (prefill) the prompt is computed, the last of its KV on its way. They hold their pages.
        prealloc: (decode) there is no room yet. They hold nothing.
        transfer: (decode) row and pages are taken, KV comes.
        ready: (decode) all KV is in place; a PREBUILT batch takes them.
        retracted: (decode) they gave up their pages, and their KV waits in host memory.
        draining: pages that nobody may take yet.
    """

    bootstrap: list[Req] = field(default_factory=list)
    inflight: list[Req] = field(default_factory=list)
    prealloc: list[Req] = field(default_factory=list)
    transfer: list[Req] = field(default_factory=list)
    ready: list[Req] = field(default_factory=list)
    retracted: list[Req] = field(default_factory=list)
    draining: list[Draining] = field(default_factory=list)

    @property
    def num_queued(self) -> int:
        """Requests that wait and hold nothing of the pools."""
        return len(self.bootstrap) + len(self.prealloc) + len(self.retracted)

    @property
    def num_arriving(self) -> int:
        """Requests whose pages are taken and that do not run yet."""
        return len(self.transfer) + len(self.ready)

    def waiting(self) -> list[Req]:
        """Those of `num_queued` and `num_arriving`."""
        return [*self.retracted, *self.bootstrap, *self.prealloc, *self.transfer, *self.ready]

    def drains(self, rid: str) -> bool:
        """Pages of an ended request of that name are still in use."""
        return any(each.rid == rid for each in self.draining)

    def take_out(self, meant: Container[int]) -> dict[int, str]:
        """Those whose `id` is in `meant` leave; by id the queue that each was in."""
        found: dict[int, str] = {}
        for name, queue in self._named():
            gone = [req for req in queue if id(req) in meant]
            if gone:
                found |= {id(req): name for req in gone}
                queue[:] = [req for req in queue if id(req) not in meant]
        return found

    def counts(self) -> dict[str, int]:
        """Lengths, under names like SGLang's."""
        return {
            "bootstrap_queue_reqs": len(self.bootstrap),
            "prefill_inflight_queue_reqs": len(self.inflight),
            "decode_prealloc_queue_reqs": len(self.prealloc),
            "decode_transfer_queue_reqs": len(self.transfer) + len(self.ready),
            "decode_retracted_queue_reqs": len(self.retracted),
        }

    def _named(self) -> tuple[tuple[str, list[Req]], ...]:
        return (
            ("bootstrap", self.bootstrap),
            ("inflight", self.inflight),
            ("prealloc", self.prealloc),
            ("transfer", self.transfer),
            ("ready", self.ready),
            ("retracted", self.retracted),
        )
