"""Packed projections against plain ones, and the independence of their rows."""

from __future__ import annotations

import pytest
import torch

from sgviz.model.fetch import resolve_model
from sgviz.model.loader import load_model
from sgviz.model.packed_linear import (
    FLOAT32,
    INT8,
    PackedLinear,
    Packing,
    pack_float32,
    pack_int8,
    quantize_rows,
)

SHAPES = ((64, 96), (1536, 48), (24, 7))
PACKERS = {
    "float32": (pack_float32, 1e-5),
    "int8": (pack_int8, 0.05 if torch.cpu._is_vnni_supported() else 0.1),
}


@pytest.fixture(params=PACKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, shape: tuple[int, int], bias: bool) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """A packed layer, inputs with an outlier in one row, and what a plain layer gives for them."""
    draw = torch.Generator().manual_seed(shape[0])
    weight, x = (torch.randn(n, shape[0], generator=draw) for n in (shape[1], 40))
    b = torch.randn(shape[1], generator=draw) if bias else None
    x[3, 5] = 500.0
    return PACKERS[kind][0](weight.clone(), b), x, torch.nn.functional.linear(x, weight, b)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_plain_layer(kind: str, shape: tuple[int, int], bias: bool) -> None:
    layer, x, expected = make(kind, shape, bias)
    residual = torch.randn_like(expected)
    tolerance = PACKERS[kind][1]
    for actual in (layer.forward(x), layer.forward_add(x, residual) - residual):
        error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.max()) < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(kind: str, shape: tuple[int, int]) -> None:
    layer, x, expected = make(kind, shape, True)
    residual = torch.randn_like(expected)
    whole, added = layer.forward(x), layer.forward_add(x, residual)
    for rows in (1, 2, 3, 8, 33):
        assert torch.equal(layer.forward(x[:rows]), whole[:rows])
        assert torch.equal(layer.forward_add(x[:rows], residual[:rows]), added[:rows])
    assert torch.equal(layer.forward(x[7:8]), whole[7:8])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packing", [FLOAT32, INT8], ids=["float32", "int8"])
def test_a_gate_is_silu_times_up_row_by_row(packing: Packing, bias: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    weight, x = torch.randn(192, 64, generator=draw) / 8, torch.randn(40, 64, generator=draw)
    b = torch.randn(192, generator=draw) if bias else None
    gate, up = torch.nn.functional.linear(x, weight, b).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    layer = packing.gate(weight.clone(), b)
    whole = layer.forward(x)
    tolerance = 1e-5 if packing is FLOAT32 else 0.1
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
    for rows in (1, 2, 8, 33):
        assert torch.equal(layer.forward(x[:rows]), whole[:rows])


def test_int8_keeps_zeros_and_constant_rows() -> None:
    """A zero beside an outlier stays zero, and a row of one value has no range to be scaled by."""
    weight = torch.eye(32)
    layer = pack_int8(weight.clone(), None)
    x = torch.zeros(3, 32)
    x[0, 0], x[1] = 1000.0, 3.0
    y = layer.forward(x)
    assert float(y[0, 1:].abs().max()) < 1e-3
    torch.testing.assert_close(y[1], x[1], atol=0.02, rtol=0.0)
    assert torch.equal(y[2], x[2])


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((quantize_rows(weight).dequantize() - weight).abs() <= steps * 0.5001).all())
    assert torch.equal(quantize_rows(torch.zeros(2, 4)).dequantize(), torch.zeros(2, 4))


def test_quantization_wants_float32_on_a_cpu() -> None:
    folder = resolve_model("tiny-llama")
    with pytest.raises(Exception, match="runs in float32 on a CPU, not in bfloat16"):
        load_model(folder, "bfloat16", quantization="w8a8_int8")
