"""BatchSnapshot: what a forward needs of a ScheduleBatch, as arrays of its own.

Taken in the scheduler's thread inside `launch`: afterwards the scheduler may finish requests, free rows and
overwrite the row table while the forward still waits or runs. Mirrors SGLang's `ScheduleBatch ->
ForwardBatch` copy of the overlap scheduler, without tensors. Imports: batch, errors (no torch).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgviz.batch.forward_mode import ForwardMode
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.errors import SgvizError

Ints = npt.NDArray[np.int64]


class BadBatch(SgvizError, ValueError):
    """The lists of a ScheduleBatch contradict each other: a fault of whoever built it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """B requests with T new positions in all.

    Attributes:
        rows, seq_lens, prefix_lens, extend_lens: [B]; see ScheduleBatch.
        input_ids: [T - decoding rows] ids of the extends; the decoding rows' ids are on the device.
        decode_rows: how many members, at the end, take their input from the FutureMap.
        out_cache_loc: [T] slots the new positions are written to.
        slot_table: [B, max(seq_lens)] slot of each position; beyond a request's seq_len: anything.
    """

    bid: int
    forward_mode: ForwardMode
    rids: list[str]
    rows: Ints
    seq_lens: Ints
    prefix_lens: Ints
    extend_lens: Ints
    input_ids: Ints
    decode_rows: int
    out_cache_loc: Ints
    slot_table: npt.NDArray[np.int32]

    @classmethod
    def take(cls, batch: ScheduleBatch) -> BatchSnapshot:
        """Copy all that the scheduler may change later. Raises BadBatch if the lengths disagree."""
        rows = np.array(batch.rows, dtype=np.int64)
        size = len(rows)
        snapshot = cls(
            bid=batch.bid,
            forward_mode=batch.forward_mode,
            rids=[req.rid for req in batch.reqs],
            rows=rows,
            seq_lens=np.array(batch.seq_lens, dtype=np.int64),
            prefix_lens=np.array(batch.prefix_lens, dtype=np.int64),
            extend_lens=np.array(batch.extend_lens, dtype=np.int64),
            input_ids=np.array(batch.input_ids, dtype=np.int64),
            decode_rows=size if batch.forward_mode.is_decode else batch.decode_rows,
            out_cache_loc=np.array(batch.out_cache_loc, dtype=np.int64),
            slot_table=batch.req_to_token_pool.table[rows, : max(batch.seq_lens, default=0)],
        )
        snapshot._check_lengths()
        return snapshot

    def _check_lengths(self) -> None:
        new = int(self.extend_lens.sum())
        if len({len(self.rows), len(self.seq_lens), len(self.prefix_lens), len(self.extend_lens)}) != 1:
            raise BadBatch(
                f"batch {self.bid}: lists of different lengths: {len(self.rows)} rows, {len(self.seq_lens)} "
                f"seq_lens, {len(self.prefix_lens)} prefix_lens, {len(self.extend_lens)} extend_lens"
            )
        if len(self.input_ids) + self.decode_rows != new or len(self.out_cache_loc) != new:
            raise BadBatch(
                f"batch {self.bid} ({self.forward_mode}): {new} new positions, but {len(self.input_ids)} "
                f"input ids with {self.decode_rows} decoding rows, and {len(self.out_cache_loc)} slots"
            )
        if (self.seq_lens != self.prefix_lens + self.extend_lens).any() or (self.extend_lens < 1).any():
            raise BadBatch(
                f"batch {self.bid}: seq_lens {self.seq_lens.tolist()} are not prefix_lens "
                f"{self.prefix_lens.tolist()} + extend_lens {self.extend_lens.tolist()} (each at least 1)"
            )
