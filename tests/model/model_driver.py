"""Drives a CausalLM by hand: slots are given out at random, as after a long run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from sgviz.batch.forward_mode import ForwardMode
from sgviz.model.attention import TorchAttention
from sgviz.model.decoder import CausalLM
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool

POOL_TOKENS = 2048


@dataclass
class Sequence:
    """A request: its ids, how many of them have KV, and its slots (whole pages) by position."""

    ids: list[int]
    done: int = 0
    slots: list[int] = field(default_factory=list)


class Driver:
    def __init__(self, model: CausalLM, page_size: int, seed: int = 0) -> None:
        facts = model.config.facts
        self.model = model
        self.page_size = page_size
        self.pool = MHATokenToKVPool(
            num_layers=facts.num_layers,
            size=POOL_TOKENS,
            page_size=page_size,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        for layer in self.pool.layers:  # what earlier requests left behind must not be seen
            layer.normal_(std=50.0, generator=torch.Generator().manual_seed(seed))
        self.attention = TorchAttention(self.pool)
        pages = POOL_TOKENS // page_size
        self._free = (np.random.default_rng(seed).permutation(pages) + 1).tolist()

    def step(self, sequences: list[Sequence], counts: list[int]) -> torch.Tensor:
        """Run the next `counts[i]` ids of each sequence in one batch; logits [B, vocab]."""
        for sequence, count in zip(sequences, counts):
            self._reserve(sequence, sequence.done + count)
        ends = [sequence.done + count for sequence, count in zip(sequences, counts)]
        table = np.zeros((len(sequences), max(ends)), dtype=np.int64)
        for row, (sequence, end) in enumerate(zip(sequences, ends)):
            table[row, :end] = sequence.slots[:end]
        spans = [slice(sequence.done, end) for sequence, end in zip(sequences, ends)]
        batch = ForwardBatch.build(
            ForwardMode.DECODE if set(counts) == {1} else ForwardMode.EXTEND,
            input_ids=[i for sequence, span in zip(sequences, spans) for i in sequence.ids[span]],
            prefix_lens=[sequence.done for sequence in sequences],
            extend_lens=counts,
            out_cache_loc=np.concatenate([table[row, span] for row, span in enumerate(spans)]),
            slot_table=table,
        )
        logits = self.model.forward(batch, self.attention)
        for sequence, end in zip(sequences, ends):
            sequence.done = end
        return logits

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """`count` greedy tokens after the prompt `ids`."""
        sequence = Sequence(list(ids))
        while len(sequence.ids) < len(ids) + count:
            logits = self.step([sequence], [len(sequence.ids) - sequence.done])
            sequence.ids.append(int(logits[0].argmax()))
        return sequence.ids[len(ids) :]

    def _reserve(self, sequence: Sequence, length: int) -> None:
        while len(sequence.slots) < length:
            first = self._free.pop() * self.page_size
            sequence.slots += range(first, first + self.page_size)
