"""ForwardBatch: the tensors of one forward. Mirrors SGLang's class of that name.

A snapshot: nothing here points into pools or tables that the scheduler goes on changing.
Imports: batch (the forward mode), torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgviz.batch.forward_mode import ForwardMode


@dataclass(slots=True, eq=False)
class ForwardBatch:
    """B requests with T new positions in all, request after request.

    Attributes:
        input_ids: [T] int64. Decode ids are known on the device only, so a caller may set them late.
        positions: [T] int64, the place of each id in its request.
        seq_lens: tokens of each request in KV after this forward (prefix + extend).
        prefix_lens, extend_lens: tokens before and new in this forward.
        out_cache_loc: [T] int64, the slot each new position is written to.
        slot_table: [B, >= max(seq_lens)] int64, the slot of every position; cells past a request's
            length are never read as content and must hold a valid slot (0 is always one).
        logit_rows: [B] int64, the row of `input_ids` each request's logits come from (its last).
        starts: the first row of each request.
    """

    forward_mode: ForwardMode
    input_ids: Tensor
    positions: Tensor
    seq_lens: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    out_cache_loc: Tensor
    slot_table: Tensor
    logit_rows: Tensor
    starts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seq_lens)

    @staticmethod
    def build(
        forward_mode: ForwardMode,
        *,
        input_ids: Sequence[int] | Tensor,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        out_cache_loc: npt.NDArray[np.integer],
        slot_table: npt.NDArray[np.integer],
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """Derive positions and rows and move everything to `device`; arrays are copied."""
        prefix = np.asarray(prefix_lens, dtype=np.int64)
        extend = np.asarray(extend_lens, dtype=np.int64)
        ends = np.cumsum(extend)
        starts = ends - extend
        positions = np.arange(int(extend.sum())) + np.repeat(prefix - starts, extend)
        ids = input_ids if isinstance(input_ids, Tensor) else torch.tensor(input_ids, dtype=torch.int64)
        return ForwardBatch(
            forward_mode=forward_mode,
            input_ids=ids.to(device),
            positions=_to(positions, device),
            seq_lens=(prefix + extend).tolist(),
            prefix_lens=prefix.tolist(),
            extend_lens=extend.tolist(),
            out_cache_loc=_to(out_cache_loc, device),
            slot_table=_to(slot_table, device),
            logit_rows=_to(ends - 1, device),
            starts=starts.tolist(),
        )


def _to(values: npt.NDArray[np.integer], device: torch.device | str) -> Tensor:
    """An int64 copy on `device`; numpy copies, since torch would start a team of threads for a large table."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
