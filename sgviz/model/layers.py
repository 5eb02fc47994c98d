"""The parts a decoder is made of: Linear, RMSNorm, RotaryEmbedding, GatedMLP.

Mirrors SGLang's layers; projections that read the same input are one matrix (q, k, v; gate, up), because few
large operators are what a small batch needs. `pack` rewrites the weights for the CPU: a norm's weight goes into
the projections behind it, and rotary halves become neighbours, so that one complex product turns them.
No tensor parallelism. Imports: model.model_config, model.packed_linear, torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgviz.model.model_config import RopeConfig, RopeType
from sgviz.model.packed_linear import PackedGate, PackedLinear, Packing


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter to be loaded; nothing here is ever trained."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b.

    Packed, it is quicker on a CPU, and a row's bits don't depend on the number of rows.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self._packed: PackedLinear | None = None

    def pack(self, packing: Packing, factor: Tensor | None = None) -> None:
        """Replace the weight by a packed form, its inputs times `factor`. Afterwards `weight` is empty."""
        weight = self.weight.data if factor is None else self.weight.data * factor
        self._packed = packing.linear(weight, None if self.bias is None else self.bias.data)
        self.weight = empty_parameter(0)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias) if self._packed is None else self._packed.forward(x)

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual` [T, out] + y."""
        if self._packed is None:
            return residual + F.linear(x, self.weight, self.bias)
        return self._packed.forward_add(x, residual)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps
        self._floor: Tensor | None = None

    def fold(self, keep_weight: bool = False) -> Tensor:
        """From now on give x / |x|, times the weight if that is kept.

        Returns the factor that is missing then, for the projections behind. Keeping the weight makes inputs that
        are easier to quantize.
        """
        size = len(self.weight)
        self._floor = torch.tensor(math.sqrt(size * self.eps))
        missing = torch.tensor(math.sqrt(size)) if keep_weight else self.weight.data * math.sqrt(size)
        if not keep_weight:
            self.weight = empty_parameter(0)
        return missing

    def forward(self, x: Tensor) -> Tensor:
        if self._floor is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # |x| is sqrt(sum x^2 + size eps), in one operator each
        length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)
        return x / length if len(self.weight) == 0 else (x * self.weight).div_(length)


class RotaryEmbedding:
    """Turns pairs of numbers of each head by an angle that grows with the position.

    A pair is (i, i + head_dim / 2), as checkpoints have it, or two neighbours once `interleave` rewrote the
    weights; neighbours are turned by one complex product. q and k must be paired alike.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self.half = head_dim // 2
        self.inv_freq = inverse_frequencies(config, head_dim).to(device)
        self.interleaved = False

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What `apply` needs for `positions` [T]; once a forward, shared by the layers."""
        angle = positions[:, None, None].to(torch.float32) * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        if self.interleaved:
            return (torch.complex(cos, sin),)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def apply(self, x: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
        """Rotate x [T, heads, head_dim]."""
        if self.interleaved:
            return torch.view_as_real(_as_complex(x) * angles[0]).flatten(-2)
        cos, sin = angles
        return torch.addcmul(x * cos, x.roll(self.half, -1), sin)

    def interleave(self, weight: Tensor, heads: int) -> Tensor:
        """`weight`, whose first rows belong to `heads` heads, with the rows of a pair side by side."""
        rows = heads * 2 * self.half
        turned = weight[:rows].unflatten(0, (heads, 2, self.half)).transpose(1, 2).flatten(0, 2)
        return torch.cat((turned, weight[rows:]))


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, scaled as `config` says."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    freq = 1.0 / config.theta**steps
    if config.kind is RopeType.LINEAR:
        return freq / config.factor
    if config.kind is RopeType.LLAMA3:
        return _llama3_frequencies(freq, config)
    return freq


def _llama3_frequencies(freq: Tensor, config: RopeConfig) -> Tensor:
    """High frequencies stay, low ones are divided by the factor, those between are blended."""
    turns = config.original_context_len * freq / (2 * math.pi)  # full turns within the trained context
    share = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = share.clamp(0.0, 1.0)
    return keep * freq + (1 - keep) * freq / config.factor


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * intermediate, bias)
        self.down_proj = Linear(intermediate, hidden, bias)
        self._packed_gate: PackedGate | None = None

    def pack(self, packing: Packing, factor: Tensor) -> None:
        """Lay the weights out for the CPU, for inputs times `factor`."""
        both = self.gate_up_proj
        self._packed_gate = packing.gate(
            both.weight.data * factor, None if both.bias is None else both.bias.data
        )
        both.weight = empty_parameter(0)
        self.down_proj.pack(packing)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.forward(self._gated(x))

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down_proj.forward_add(self._gated(x), residual)

    def _gated(self, x: Tensor) -> Tensor:
        if self._packed_gate is not None:
            return self._packed_gate.forward(x)
        gate, up = self.gate_up_proj.forward(x).chunk(2, -1)
        return F.silu(gate).mul_(up)
