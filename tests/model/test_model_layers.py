"""Layers against transformers' or a direct formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sgviz.model.layers import Linear, RMSNorm, RotaryEmbedding, inverse_frequencies
from sgviz.model.model_config import RopeConfig, RopeType
from sgviz.model.packed_linear import FLOAT32


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_equal_transformers(kind: str) -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": kind,
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=65536, rope_parameters=scaling
    )
    own = RopeConfig(theta=500000.0, kind=RopeType(kind), factor=8.0, original_context_len=8192)
    torch.testing.assert_close(inverse_frequencies(own, 64), LlamaRotaryEmbedding(config).inv_freq)


def test_rotation_keeps_length_and_depends_on_distance_only() -> None:
    rope = RotaryEmbedding(RopeConfig(theta=10000.0), 16, "cpu")
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q = rope.apply(q, rope.angles(torch.tensor([at_q]), torch.float32))
        turned_k = rope.apply(k, rope.angles(torch.tensor([at_k]), torch.float32))
        torch.testing.assert_close(turned_q.norm(), q.norm())
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(score(5, 2), score(5, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_gives_each_row_the_same_bits_in_any_batch(bias: bool) -> None:
    layer = Linear(64, 96, bias)
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(40, 64)
    expected = F.linear(x, layer.weight, layer.bias)
    layer.pack(FLOAT32)
    whole = layer.forward(x)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for rows in (1, 2, 7, 33):
        assert torch.equal(layer.forward(x[:rows]), whole[:rows])


def test_rms_norm_is_scale_free() -> None:
    norm = RMSNorm(32, 1e-6)
    norm.weight.data.fill_(2.0)
    x = torch.randn(3, 32)
    torch.testing.assert_close(norm.forward(x), norm.forward(1000 * x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(norm.forward(x).square().mean(-1), torch.full((3,), 4.0), atol=1e-3, rtol=1e-3)
