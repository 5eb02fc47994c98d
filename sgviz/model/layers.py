"""The parts a decoder is made of: Linear, RMSNorm, RotaryEmbedding, GatedMLP.

Mirrors SGLang's layers; projections that read the same input are one matrix (q, k, v; gate, up), because few
large operators are what a small batch needs. No tensor parallelism and no quantization yet.
Imports: model.model_config, torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgviz.model.model_config import RopeConfig, RopeType

PACK_ROWS_HINT = 8  # the batch size oneDNN lays packed weights out for


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter to be loaded; nothing here is ever trained."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b.

    `pack` swaps W for oneDNN's layout: quicker on CPU, and a row's bits don't depend on the number of rows.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Replace the weight by its packed form. Afterwards `weight` is empty."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACK_ROWS_HINT)
        self.weight = empty_parameter(0)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryEmbedding:
    """Turns halves of each head against each other by an angle that grows with the position."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self.half = head_dim // 2
        self.inv_freq = inverse_frequencies(config, head_dim).to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin [T, 1, head_dim] for `apply`; once a forward, shared by the layers."""
        angle = positions[:, None, None].to(torch.float32) * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def apply(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [T, heads, head_dim]."""
        cos, sin = angles
        return torch.addcmul(x * cos, x.roll(self.half, -1), sin)


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

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.forward(x).chunk(2, -1)
        return self.down_proj.forward(F.silu(gate).mul_(up))
