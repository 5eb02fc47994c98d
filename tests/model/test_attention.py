"""TorchAttention against textbook attention over each request alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgviz.batch.forward_mode import ForwardMode
from sgviz.model.attention import MAX_PADDED_CELLS, TorchAttention, length_groups
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool

KV_HEADS, GROUP, DIM = 2, 3, 8
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last len(q) positions attend to all before them; float64, one head at a time."""
    new, total = len(q), len(k)
    out = torch.empty(new, KV_HEADS * GROUP, DIM, dtype=torch.float64)
    for head in range(KV_HEADS * GROUP):
        scores = q[:, head].double() @ k[:, head // GROUP].double().T / DIM**0.5
        for row in range(new):
            seen = total - new + row + 1
            out[row, head] = scores[row, :seen].softmax(0) @ v[:seen, head // GROUP].double()
    return out.reshape(new, -1).float()


def make_pool(page_size: int) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        num_layers=2,
        size=512,
        page_size=page_size,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device="cpu",
    )
    for layer in pool.layers:
        layer.normal_(std=100.0)
    return pool


def slot_rows(spans: list[tuple[int, int]], page_size: int) -> np.ndarray:
    """Slots of each request, drawn page-wise without overlap."""
    width = max(prefix + new for prefix, new in spans)
    pages = -(-width // page_size)
    drawn = np.random.default_rng(len(spans)).permutation(512 // page_size)[: len(spans) * pages] + 1
    rows = drawn.reshape(len(spans), pages, 1) * page_size + np.arange(page_size)
    return rows.reshape(len(spans), -1)[:, :width]


@settings(max_examples=60, deadline=None)
@given(spans=spans, page_size=st.sampled_from([1, 4, 16]))
def test_equals_textbook_attention(spans: list[tuple[int, int]], page_size: int) -> None:
    torch.manual_seed(sum(new for _, new in spans))
    pool = make_pool(page_size)
    attention = TorchAttention(pool)
    table = slot_rows(spans, page_size)
    keys = [torch.randn(prefix + new, KV_HEADS, DIM) for prefix, new in spans]
    values = [torch.randn(prefix + new, KV_HEADS, DIM) for prefix, new in spans]
    q = torch.randn(sum(new for _, new in spans), KV_HEADS * GROUP, DIM)
    for row, (prefix, _) in enumerate(spans):
        pool.write(1, torch.tensor(table[row, :prefix]), keys[row][:prefix], values[row][:prefix])
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        input_ids=[0] * len(q),
        prefix_lens=[prefix for prefix, _ in spans],
        extend_lens=[new for _, new in spans],
        out_cache_loc=np.concatenate([table[row, p : p + new] for row, (p, new) in enumerate(spans)]),
        slot_table=table,
    )
    attention.prepare(batch)
    new_keys = torch.cat([key[prefix:] for key, (prefix, _) in zip(keys, spans)])
    new_values = torch.cat([value[prefix:] for value, (prefix, _) in zip(values, spans)])
    out = attention.forward(1, q, new_keys, new_values)
    parts = q.split([new for _, new in spans])
    expected = torch.cat([naive(*part) for part in zip(parts, keys, values)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=80))
def test_length_groups_hold_every_row_once_and_bound_the_padding(lengths: list[int]) -> None:
    rows = list(range(len(lengths)))
    groups = length_groups(rows, lengths)
    assert sorted(row for group in groups for row in group) == rows
    for group in groups:
        padded = max(lengths[row] for row in group) * len(group)
        assert padded <= 2 * sum(lengths[row] for row in group)
        assert padded <= MAX_PADDED_CELLS or len(group) == 1


def test_equal_lengths_stay_one_group_in_order() -> None:
    assert length_groups([0, 2, 5], [7, 0, 8, 0, 0, 7]) == [[0, 2, 5]]
    assert length_groups([], [3]) == []


@pytest.mark.parametrize("page_size", [1, 16])
def test_pool_writes_only_where_told(page_size: int) -> None:
    pool = make_pool(page_size)
    before = [layer.clone() for layer in pool.layers]
    slots = torch.tensor([page_size, page_size + 3, 511])
    pool.write(0, slots, torch.ones(3, KV_HEADS, DIM), torch.full((3, KV_HEADS, DIM), 2.0))
    changed = (pool.layers[0] != before[0]).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert changed == slots.tolist()
    assert torch.equal(pool.layers[1], before[1])
    assert (pool.layers[0][1][:, slots] == 2.0).all()


def test_pool_size_and_bytes() -> None:
    pool = make_pool(16)
    assert pool.num_slots == 512 + 16
    assert pool.bytes_per_token == 2 * 2 * KV_HEADS * DIM * 4
