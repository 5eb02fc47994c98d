"""The traced decode step against the eager one: one trace for every number of rows, length and page size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sgviz.batch.forward_mode import ForwardMode
from sgviz.model.attention import TorchAttention
from sgviz.model.decode_graph import DecodeGraph
from sgviz.model.decoder import CausalLM
from sgviz.model.fetch import resolve_model
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.model.loader import load_model

POOL = 4096
LENGTHS = (1, 2, 7, 16, 17, 31, 32, 33, 40, 48, 64, 63, 5, 90, 91, 77)


class Rig:
    """A model over a pool full of what earlier requests left, with the graph and the eager attention on it."""

    def __init__(self, name: str, page_size: int, quantization: str | None = None) -> None:
        self.model: CausalLM = load_model(resolve_model(name), "float32", quantization=quantization)
        facts = self.model.config.facts
        self.page_size = page_size
        self.pool = MHATokenToKVPool(
            num_layers=facts.num_layers,
            size=POOL,
            page_size=page_size,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        draw = torch.Generator().manual_seed(3)
        for layer in self.pool.layers:
            layer.normal_(generator=draw)
        self.eager = TorchAttention(self.pool)
        self.graph = DecodeGraph(self.model, self.pool)
        self._pages = np.random.default_rng(5).permutation(POOL // page_size) + 1

    def batch(self, lengths: tuple[int, ...]) -> ForwardBatch:
        """One new position behind lengths[i] - 1 others each; no two share a page."""
        wide = -(-max(LENGTHS) // self.page_size)
        pages = self._pages[: len(LENGTHS) * wide].reshape(len(LENGTHS), wide, 1) * self.page_size
        table = (pages + np.arange(self.page_size)).reshape(len(LENGTHS), -1)
        members = [LENGTHS.index(length) for length in lengths]
        table = table[members][:, : max(lengths)]
        return ForwardBatch.build(
            ForwardMode.DECODE,
            input_ids=[10 + member for member in members],
            prefix_lens=[length - 1 for length in lengths],
            extend_lens=[1] * len(lengths),
            out_cache_loc=np.array([row[length - 1] for row, length in zip(table, lengths)]),
            slot_table=table,
        )

    def run(self, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits and the FutureMap's buffer afterwards, by the graph."""
        batch = self.batch(lengths)
        rows = torch.arange(len(lengths), 0, -1)
        last = torch.full((len(lengths) + 2,), -1)
        last[rows] = batch.input_ids
        inputs = self.graph.prepare(batch, rows)
        assert inputs is not None
        out = self.graph.run(last, inputs)
        assert not out.unknown
        assert not out.nan
        assert torch.equal(last[rows], out.tokens)
        assert torch.equal(out.tokens, out.logits.argmax(-1))
        return out.logits, last


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    scope="module", params=[(1, None), (16, None), (1, "w8a8_int8")], ids=["page1", "page16", "int8"]
)
def rig(request: pytest.FixtureRequest, name: str) -> Rig:
    page_size, quantization = request.param
    return Rig(name, page_size, quantization)


@pytest.mark.parametrize("lengths", [(7,), (16, 17), LENGTHS[8:], (90, 91, 77, 64, 63, 48)], ids=str)
def test_logits_and_kv_are_those_of_the_eager_step(rig: Rig, lengths: tuple[int, ...]) -> None:
    eager = rig.model.forward(rig.batch(lengths), rig.eager)
    written = [layer.clone() for layer in rig.pool.layers]
    logits, _ = rig.run(lengths)
    torch.testing.assert_close(logits, eager, atol=1e-4, rtol=1e-4)
    for before, after in zip(written, rig.pool.layers):
        torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)


def test_a_row_has_the_same_bits_alone_and_among_others(rig: Rig) -> None:
    lengths = (48, 64, 63, 33, 40, 90, 91, 77)
    together, _ = rig.run(lengths)
    for i, length in enumerate(lengths):
        alone, _ = rig.run((length,))
        assert torch.equal(alone[0], together[i])


def test_rows_of_very_different_length_are_left_to_the_eager_step(rig: Rig) -> None:
    assert rig.graph.prepare(rig.batch((91, 1, 2, 7)), torch.arange(4)) is None


def test_a_row_without_a_token_is_told_and_stays_without(rig: Rig) -> None:
    batch = rig.batch((7, 5))
    last = torch.tensor([0, -1, 12])
    inputs = rig.graph.prepare(batch, torch.tensor([1, 2]))
    assert inputs is not None
    assert rig.graph.run(last, inputs).unknown
    assert last[1] == -1


def test_nan_is_told(rig: Rig) -> None:
    batch = rig.batch((7, 5))
    keep = rig.pool.layers[0].clone()
    rig.pool.layers[0][1][:, batch.slot_table[0, 2]] = torch.nan
    inputs = rig.graph.prepare(batch, torch.tensor([1, 2]))
    assert inputs is not None
    out = rig.graph.run(torch.tensor([0, 11, 12]), inputs)
    rig.pool.layers[0].copy_(keep)
    assert out.nan
    assert not bool(out.logits[1].isnan().any())
