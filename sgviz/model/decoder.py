"""The decoder that Llama, Qwen2 and Qwen3 share: CausalLM and its layers.

Mirrors SGLang's `LlamaForCausalLM` with its logits processor folded in: logits are computed for the
rows that need them only. The attention backend is handed in with each forward, so the model owns no KV.
Imports: model.attention, forward_batch, layers, model_config, torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgviz.model.attention import AttentionBackend
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.layers import GatedMLP, Linear, RMSNorm, RotaryEmbedding, empty_parameter
from sgviz.model.model_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """In what the architectures differ."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False


class Attention(nn.Module):
    """Grouped-query attention of one layer around the backend that holds the KV."""

    def __init__(self, config: DecoderConfig, traits: DecoderTraits, layer: int) -> None:
        super().__init__()
        facts = config.facts
        self.layer = layer
        self.heads, self.kv_heads, self.dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, (self.heads + 2 * self.kv_heads) * self.dim, traits.qkv_bias
        )
        self.o_proj = Linear(self.heads * self.dim, config.hidden_size, traits.out_bias)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps) if traits.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps) if traits.qk_norm else None

    def forward(
        self, x: Tensor, rope: RotaryEmbedding, angles: tuple[Tensor, Tensor], attn: AttentionBackend
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        qkv = self.qkv_proj.forward(x).view(x.shape[0], -1, self.dim)
        rotated = rope.apply(self._normed(qkv[:, : self.heads + self.kv_heads]), angles)
        q, k, v = rotated[:, : self.heads], rotated[:, self.heads :], qkv[:, self.heads + self.kv_heads :]
        return self.o_proj.forward(attn.forward(self.layer, q, k, v))

    def _normed(self, qk: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk
        return torch.cat(
            (self.q_norm.forward(qk[:, : self.heads]), self.k_norm.forward(qk[:, self.heads :])), 1
        )


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: DecoderConfig, traits: DecoderTraits, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, traits, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, x: Tensor, rope: RotaryEmbedding, angles: tuple[Tensor, Tensor], attn: AttentionBackend
    ) -> Tensor:
        x = x + self.self_attn.forward(self.input_layernorm.forward(x), rope, angles, attn)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))


class Embedding(nn.Module):
    """Rows of a table by id."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Decoder(nn.Module):
    """Embedding, layers and final norm, under the names that checkpoints use."""

    def __init__(self, config: DecoderConfig, traits: DecoderTraits) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.facts.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, traits, layer) for layer in range(config.facts.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """A decoder with its output projection. Subclasses name their traits."""

    def __init__(
        self, config: DecoderConfig, traits: DecoderTraits, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        self.rope = RotaryEmbedding(config.rope, config.facts.head_dim, device)
        with torch.device("meta"):  # memory is taken once, in the wanted dtype
            self.model = Decoder(config, traits)
            self.lm_head = Linear(config.hidden_size, config.facts.vocab_size, bias=False)
        self.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """Run `batch`, writing its KV through `attn`.

        Returns logits [B, vocab] float32, row by request, of the rows `batch.logit_rows`.
        """
        attn.prepare(batch)
        x = self.model.embed_tokens.forward(batch.input_ids)
        angles = self.rope.angles(batch.positions, x.dtype)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            x = layer.forward(x, self.rope, angles, attn)
        last = self.model.norm.forward(x.index_select(0, batch.logit_rows))
        return self.lm_head.forward(last).float()

    def pack(self) -> None:
        """Lay the weights of all projections out for the CPU (float32 only); see Linear."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
