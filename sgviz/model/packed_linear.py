"""Projections in the layouts that are quick on a CPU: float32 packed by oneDNN, int8 packed by fbgemm.

Both are scripted modules, because only inside one can an operator on a packed weight be traced into the decode
graph. Mirrors SGLang's quantization methods (UnquantizedLinearMethod, W8A8Int8LinearMethod) for CPU.
Imports: model.torch_jit, torch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from sgviz.model import torch_jit

PACK_ROWS_HINT = 8  # the batch size oneDNN lays packed weights out for
WEIGHT_LEVELS = 127  # int8 weights are symmetric
SMALLEST_PEAK = 1e-30  # stands for the largest weight of a row of zeros


class PackedLinear(Protocol):
    """y = x W^T + b [+ residual] for x [T, in]; a row's bits do not depend on the other rows."""

    def forward(self, x: Tensor) -> Tensor: ...

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor: ...


class PackedGate(Protocol):
    """y = silu(x G^T + g) * (x U^T + u) for x [T, in]."""

    def forward(self, x: Tensor) -> Tensor: ...


class _Float32Linear(nn.Module):
    """oneDNN; the residual is added by the same operator."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        self.bias = bias
        self.in_pairs = _alone_differs(weight.shape[1], weight.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat(2, 1) if self.in_pairs and x.shape[0] == 1 else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return y[: x.shape[0]]

    @torch.jit.export
    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.in_pairs and x.shape[0] == 1:
            return self.forward(x) + residual
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, residual, self.weight, self.bias, "add")
        return y


class _Float32Gate(nn.Module):
    """silu(gate(x)) * up(x) as two oneDNN operators, the second taking the product along."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        gate, up = weight.chunk(2)
        self.gate = torch.ops.mkldnn._reorder_linear_weight(gate.contiguous(), PACK_ROWS_HINT)
        self.up = torch.ops.mkldnn._reorder_linear_weight(up.contiguous(), PACK_ROWS_HINT)
        self.gate_bias = None if bias is None else bias[: len(gate)]
        self.up_bias = None if bias is None else bias[len(gate) :]
        self.in_pairs = _alone_differs(gate.shape[1], gate.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat(2, 1) if self.in_pairs and x.shape[0] == 1 else x
        gate = torch.ops.mkldnn._linear_pointwise(rows, self.gate, self.gate_bias, "swish", [], "")
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, gate, self.up, self.up_bias, "mul")
        return y[: x.shape[0]]


class _Int8Linear(nn.Module):
    """fbgemm. Each row is moved and scaled into one range, so that one scale serves all rows.

    What the move took away comes back as middle * (sum of the weights of an output). A row's own range on both
    sides halves the loss against scaling by its largest value; the middle is a whole number of steps, so that
    a zero stays one: beside an outlier most values are nearly zero, and their errors would add up. Activations
    get 8 bits where the CPU adds int8 products without saturation (VNNI), else 7.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        quantized = quantize_rows(weight)
        self.weight = torch.ops.quantized.linear_prepack(quantized, None)
        self.sums = quantized.dequantize().sum(1)
        self.bias = bias
        self.levels = 127 if torch.cpu._is_vnni_supported() else 63

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        step = (high - low).mul_(0.5 / self.levels).clamp_min_(1e-20)  # a row of one value has no range
        middle = (high + low).mul_(0.5).div_(step).round_().mul_(step)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            (x - middle).div_(step), 1.0, self.levels + 1, self.weight
        )
        y = y.mul_(step).addcmul_(middle, self.sums)
        bias = self.bias
        return y if bias is None else y.add_(bias)

    @torch.jit.export
    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.forward(x).add_(residual)


class _Int8Gate(nn.Module):
    """silu(gate(x)) * up(x) with one int8 product for both."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.both = _Int8Linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both.forward(x).chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)


def pack_float32(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """`weight` [out, in] for oneDNN; `weight` itself is needed no more."""
    return _scripted(_Float32Linear(weight, bias))


def pack_int8(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """`weight` [out, in] in int8 with a scale for each output, for fbgemm."""
    return _scripted(_Int8Linear(weight, bias))


def pack_float32_gate(weight: Tensor, bias: Tensor | None) -> PackedGate:
    """`weight` [2 * out, in], gate above up, for oneDNN."""
    return _scripted(_Float32Gate(weight, bias))


def pack_int8_gate(weight: Tensor, bias: Tensor | None) -> PackedGate:
    """`weight` [2 * out, in], gate above up, in int8 for fbgemm."""
    return _scripted(_Int8Gate(weight, bias))


@dataclass(frozen=True, slots=True)
class Packing:
    """How the projections of a model are packed.

    Attributes:
        linear, gate: take weight and bias; see `pack_float32` and `pack_float32_gate`.
        keep_norm_weights: inputs are easier to quantize with the weights of the norm before in them.
    """

    linear: Callable[[Tensor, Tensor | None], PackedLinear]
    gate: Callable[[Tensor, Tensor | None], PackedGate]
    keep_norm_weights: bool


FLOAT32 = Packing(pack_float32, pack_float32_gate, False)
INT8 = Packing(pack_int8, pack_int8_gate, True)


def quantize_rows(weight: Tensor) -> Tensor:
    """`weight` as a quantized tensor, symmetric, one scale a row."""
    scales = (weight.abs().amax(1).clamp_min(SMALLEST_PEAK) / WEIGHT_LEVELS).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves quantized tensors elsewhere; the packed operators stay
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        return torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)


@functools.cache  # a fact of this CPU and the shape; a model has thirty layers of the same five shapes
def _alone_differs(in_features: int, out_features: int) -> bool:
    """oneDNN has a kernel of its own for a single row; with long rows it adds in another order."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(out_features, in_features, generator=generator)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
    x = torch.rand(2, in_features, generator=generator)
    both, alone = (
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "") for rows in (x, x[:1])
    )
    return not torch.equal(both[:1], alone)


def _scripted(module: nn.Module) -> PackedLinear:
    return cast(PackedLinear, torch_jit.script(module))
