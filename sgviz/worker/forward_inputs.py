"""From a BatchSnapshot to the tensors of a ForwardBatch, and onto the device.

Imports: model.forward_batch, worker.snapshot, torch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sgviz.model.forward_batch import ForwardBatch
from sgviz.worker.snapshot import BatchSnapshot


def forward_batch_of(taken: BatchSnapshot) -> ForwardBatch:
    """On the host; the ids of decoding rows follow on the stream."""
    return ForwardBatch.build(
        taken.forward_mode,
        input_ids=torch.from_numpy(taken.input_ids),
        prefix_lens=taken.prefix_lens.tolist(),
        extend_lens=taken.extend_lens.tolist(),
        out_cache_loc=taken.out_cache_loc,
        slot_table=taken.slot_table,
    )


def moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """The batch's tensors on `device`; on CPU they are there already."""
    if device.type == "cpu":
        return batch

    def to(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return replace(
        batch,
        input_ids=to(batch.input_ids),
        positions=to(batch.positions),
        out_cache_loc=to(batch.out_cache_loc),
        slot_table=to(batch.slot_table),
        logit_rows=to(batch.logit_rows),
    )
