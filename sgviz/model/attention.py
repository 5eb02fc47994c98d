"""Attention over the paged pool with plain torch, on CPU and GPU. Mirrors SGLang's torch-native backend.

Requests that add one position (decoding ones, and their like in mixed batches) run together: their KV is
gathered into padded rows, and a bmm serves all query heads of a KV head at once, so grouped heads are
never copied. Requests that add more run one by one through SDPA. What depends on the batch only is
computed once in `prepare` and used by every layer.
Imports: model.forward_batch, model.kv_pool, torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool

MAX_PADDED_CELLS = 65536  # positions gathered at once: bounds the scratch memory of a decode step
WASTE_LIMIT = 2  # a row shorter than 1/2 of its group's longest starts a group of its own kind


class AttentionBackend(Protocol):
    """Writes and reads KV for one forward at a time."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Look at the batch once, before its first layer."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [T, KV heads, head_dim], and attend with q [T, heads, head_dim].

        Returns [T, heads * head_dim].
        """
        ...


@dataclass(slots=True)
class _SingleRows:
    """Requests that add one position: `rows` are their rows in the batch, None for all in order."""

    rows: Tensor | None
    count: int
    index: Tensor
    bias: Tensor  # [KV heads * count, 1, s] added to the scores: 0 or -inf


@dataclass(slots=True)
class _Extend:
    """A request that adds rows start..end; `index` and `bias` only if it has a prefix in KV."""

    start: int
    end: int
    seq_len: int
    index: Tensor | None
    bias: Tensor | None  # [end - start, seq_len]


class TorchAttention:
    """AttentionBackend over an MHATokenToKVPool. Holds the metadata of the forward under way."""

    def __init__(self, kv_pool: MHATokenToKVPool) -> None:
        self.kv_pool = kv_pool
        self._out_cache_loc = torch.empty(0, dtype=torch.int64)
        self._singles: list[_SingleRows] = []
        self._extends: list[_Extend] = []

    def prepare(self, batch: ForwardBatch) -> None:
        self._out_cache_loc = batch.out_cache_loc
        single = [i for i, length in enumerate(batch.extend_lens) if length == 1]
        whole = len(single) == len(batch)
        self._singles = [
            self._plan_singles(batch, group, whole and len(group) == len(batch))
            for group in length_groups(single, batch.seq_lens)
        ]
        self._extends = [self._plan_extend(batch, i) for i, n in enumerate(batch.extend_lens) if n > 1]

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kv_pool.write(layer, self._out_cache_loc, k, v)
        if len(self._singles) == 1 and self._singles[0].rows is None:
            return self._run_singles(layer, self._singles[0], q)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in self._singles:
            assert group.rows is not None
            out.index_copy_(0, group.rows, self._run_singles(layer, group, q.index_select(0, group.rows)))
        for part in self._extends:
            out[part.start : part.end] = self._run_extend(layer, part, q, k, v)
        return out

    def _plan_singles(self, batch: ForwardBatch, group: list[int], all_in_order: bool) -> _SingleRows:
        """Index and bias of requests `group`, padded to the longest of them."""
        pool, device = self.kv_pool, batch.slot_table.device
        lens = torch.tensor([batch.seq_lens[i] for i in group], device=device)
        padded = _whole_pages(max(batch.seq_lens[i] for i in group), pool.page_size)
        table = batch.slot_table[:, :padded]
        if not all_in_order:
            table = table[torch.tensor(group, device=device)]
        beyond = torch.arange(padded, device=device) >= lens[:, None]
        # What is masked takes part in the products: stale cells may name a slot with a NaN, slot 0 has none.
        table = table.masked_fill(beyond[:, : table.shape[1]], 0)
        bias = torch.zeros(beyond.shape, dtype=pool.dtype, device=device).masked_fill_(beyond, -torch.inf)
        rows = None if all_in_order else torch.tensor([batch.starts[i] for i in group], device=device)
        return _SingleRows(
            rows, len(group), pool.gather_index(table), bias.repeat(pool.num_kv_heads, 1)[:, None]
        )

    def _plan_extend(self, batch: ForwardBatch, i: int) -> _Extend:
        start, new, prefix = batch.starts[i], batch.extend_lens[i], batch.prefix_lens[i]
        if prefix == 0:
            return _Extend(start, start + new, new, None, None)
        pool, device, length = self.kv_pool, batch.slot_table.device, prefix + new
        hidden = torch.ones(new, length, dtype=torch.bool, device=device).triu_(prefix + 1)
        bias = torch.zeros(new, length, dtype=pool.dtype, device=device).masked_fill_(hidden, -torch.inf)
        return _Extend(
            start, start + new, length, pool.gather_index(batch.slot_table[i : i + 1, :length]), bias
        )

    def _run_singles(self, layer: int, group: _SingleRows, q: Tensor) -> Tensor:
        """[count, heads, head_dim] -> [count, heads * head_dim]."""
        n, heads, dim = q.shape
        kv_heads = self.kv_pool.num_kv_heads
        keys, values = self.kv_pool.gather(layer, group.index, group.count)
        folded = q.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1)
        folded = folded.reshape(kv_heads * n, heads // kv_heads, dim)
        bias = group.bias.expand(-1, heads // kv_heads, -1)
        scores = torch.baddbmm(bias, folded, keys.transpose(1, 2), alpha=dim**-0.5)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        out = torch.bmm(weights, values)
        return out.view(kv_heads, n, -1).transpose(0, 1).reshape(n, heads * dim)

    def _run_extend(self, layer: int, part: _Extend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA with KV heads as the batch, so the query heads of a group share K and V by stride 0."""
        new, (heads, dim), kv_heads = part.end - part.start, q.shape[1:], self.kv_pool.num_kv_heads
        queries = q[part.start : part.end].view(new, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        if part.index is None:
            keys = k[part.start : part.end].transpose(0, 1)
            values = v[part.start : part.end].transpose(0, 1)
        else:
            keys, values = self.kv_pool.gather(layer, part.index, 1)
            keys, values = keys[:, : part.seq_len], values[:, : part.seq_len]
        out = F.scaled_dot_product_attention(
            queries,
            keys[:, None].expand(-1, heads // kv_heads, -1, -1),
            values[:, None].expand(-1, heads // kv_heads, -1, -1),
            attn_mask=part.bias,
            is_causal=part.bias is None,
        )
        return out.permute(2, 0, 1, 3).reshape(new, heads * dim)


def length_groups(rows: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Split `rows` so that padding at most doubles the work and no group passes MAX_PADDED_CELLS.

    One group in the given order where that holds already, which is the usual case.
    """
    if not rows:
        return []
    longest = max(seq_lens[i] for i in rows)
    if longest * len(rows) <= min(MAX_PADDED_CELLS, WASTE_LIMIT * sum(seq_lens[i] for i in rows)):
        return [rows]
    groups: list[list[int]] = []
    for i in sorted(rows, key=lambda row: -seq_lens[row]):
        head = seq_lens[groups[-1][0]] if groups else 0
        fits = (
            groups and WASTE_LIMIT * seq_lens[i] >= head and head * (len(groups[-1]) + 1) <= MAX_PADDED_CELLS
        )
        if fits:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _whole_pages(length: int, page_size: int) -> int:
    return -(-length // page_size) * page_size
