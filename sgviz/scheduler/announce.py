"""Tells that a request is in the waiting queue, with what a recording needs to drive a scheduler again.

Imports: batch, messages, events.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sgviz.batch.req import Req
from sgviz.events import Tracer, schema
from sgviz.messages.rids import HEALTH_CHECK_PREFIX


class Announcer:
    """Emits queue.entered for new requests."""

    def __init__(self, trace: Tracer) -> None:
        self._trace = trace
        self._encode = msgspec.msgpack.Encoder().encode

    def entered(self, req: Req, position: int) -> None:
        """`req` is at `position` of the queue."""
        if not self._trace.on:
            return
        self._trace.emit(
            schema.QueueEntered(
                rid=req.rid,
                position=position,
                prompt_tokens=len(req.origin_input_ids),
                max_new_tokens=req.max_new_tokens,
                stream=req.stream,
                input_ids=np.asarray(req.origin_input_ids, dtype="<i4").tobytes(),
                sampling=self._encode(req.sampling_params),
                extra_key=req.namespace,
                received_ns=req.time_stats.scheduler_recv,
                probe=req.rid.startswith(HEALTH_CHECK_PREFIX),
                priority=req.priority,
                embedding=req.is_embedding,
            )
        )
