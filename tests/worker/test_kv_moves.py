"""KV out of one pool and into another: bit-equal, at other slots and other page sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgviz.errors import SgvizError
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.worker.kv_moves import KVMoves, layout_of
from sgviz.worker.stream import CpuStream


def pool(page_size: int, dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    made = MHATokenToKVPool(
        num_layers=3, size=64, page_size=page_size, num_kv_heads=2, head_dim=8, dtype=dtype, device="cpu"
    )
    for layer in made.layers:
        layer.copy_(torch.randn(layer.shape))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages", [(1, 1), (1, 16), (16, 1), (16, 8)])
@pytest.mark.parametrize("count", [0, 5, 16, 32])
def test_kv_is_the_same_elsewhere(pages: tuple[int, int], count: int, dtype: torch.dtype) -> None:
    source, target = pool(pages[0], dtype), pool(pages[1], dtype)
    stream = CpuStream()
    out, into = KVMoves(lambda: source, stream), KVMoves(lambda: target, stream)
    read = np.arange(16, 16 + count) if pages[0] > 1 else np.random.default_rng(1).permutation(60)[:count] + 1
    write = np.concatenate((np.arange(48, 64), np.arange(16, 32)))[:count]
    before = [layer.clone() for layer in target.layers]
    data = memoryview(bytearray(count * layout_of(source).wire_bytes))
    out.read_kv(read.astype(np.int64), data).result()
    start, end = into.write_kv(write.astype(np.int64), data).result()
    stream.close()
    assert start <= end and layout_of(source) == layout_of(target)
    others = [slot for slot in range(target.num_slots) if slot not in write]
    for a, b, old in zip(source.layers, target.layers, before):
        assert torch.equal(a[:, :, read], b[:, :, write])
        assert torch.equal(b[:, :, others], old[:, :, others])


def test_the_wire_form_does_not_know_pages() -> None:
    source, stream = pool(16), CpuStream()
    moves = KVMoves(lambda: source, stream)
    slots = np.arange(32, 48)
    data = bytearray(16 * layout_of(source).wire_bytes)
    moves.read_kv(slots, memoryview(data)).result()
    stream.close()
    wire = torch.frombuffer(data, dtype=torch.float32).view(3, 2, 2, 16, 8)
    assert torch.equal(wire, torch.stack([layer[:, :, 32:48] for layer in source.layers]))


def test_wrong_sizes_and_slots_are_refused() -> None:
    source, stream = pool(1), CpuStream()
    moves = KVMoves(lambda: source, stream)
    with pytest.raises(SgvizError, match="bytes"):
        moves.read_kv(np.arange(3), memoryview(bytearray(5))).result()
    size = layout_of(source).wire_bytes
    with pytest.raises(SgvizError, match="slots"):
        moves.write_kv(np.array([900]), memoryview(bytearray(size))).result()
    stream.close()
