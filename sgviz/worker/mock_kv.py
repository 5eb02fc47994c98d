"""The KV of a MockWorker when it travels: the id behind each slot, so that a wrong transfer shows as another token.

Imports: cache (types), errors, worker.kv_copy, worker.protocol, worker.stream, numpy.
"""

from __future__ import annotations

import numpy as np

from sgviz.cache.req_kv import Slots
from sgviz.errors import SgvizError
from sgviz.worker.kv_copy import StreamCopy, timed
from sgviz.worker.protocol import KVLayout
from sgviz.worker.snapshot import Ints
from sgviz.worker.stream import Stream

ITEM = 8


def mock_layout(vocab_size: int, bytes_per_token: int) -> KVLayout:
    """`vocab_size`: the rule for tokens depends on it. `bytes_per_token`: what a model would have; 0: what travels."""
    return KVLayout(tag=f"mock:int64:{vocab_size}", wire_bytes=ITEM, nominal_bytes=bytes_per_token or ITEM)


def read_ids(stream: Stream, kv: Ints, slots: Slots, out: memoryview) -> StreamCopy:
    """Copy what the slots hold into `out`, 8 bytes each, behind the launches."""
    slots = slots.copy()

    def copy() -> None:
        np.frombuffer(_checked(kv, slots, out), dtype=np.int64)[:] = kv[slots]

    return StreamCopy(stream.submit(lambda: timed(copy)))


def write_ids(stream: Stream, kv: Ints, slots: Slots, data: memoryview) -> StreamCopy:
    """The other way."""
    slots = slots.copy()

    def copy() -> None:
        kv[slots] = np.frombuffer(_checked(kv, slots, data), dtype=np.int64)

    return StreamCopy(stream.submit(lambda: timed(copy)))


def _checked(kv: Ints, slots: Slots, buffer: memoryview) -> memoryview:
    if buffer.nbytes != ITEM * len(slots):
        raise SgvizError(
            f"{len(slots)} tokens have {ITEM * len(slots)} bytes, the buffer has {buffer.nbytes}"
        )
    if len(slots) and not 0 < int(slots.min()) <= int(slots.max()) < len(kv):
        raise SgvizError(f"slots {slots.min()} to {slots.max()} are not all in a pool of {len(kv)}")
    return buffer
