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
from sgviz.model.model_config import DecoderConfig, Quantization
from sgviz.model.packed_linear import FLOAT32, INT8, Packing


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

    def forward_add(
        self,
        x: Tensor,
        residual: Tensor,
        rope: RotaryEmbedding,
        angles: tuple[Tensor, ...],
        attn: AttentionBackend,
    ) -> Tensor:
        """x and residual [T, hidden] -> [T, hidden]."""
        qkv = self.qkv_proj.forward(x).unflatten(-1, (-1, self.dim))
        rotated = rope.apply(self._normed(qkv[:, : self.heads + self.kv_heads]), angles)
        q, k, v = rotated[:, : self.heads], rotated[:, self.heads :], qkv[:, self.heads + self.kv_heads :]
        return self.o_proj.forward_add(attn.forward(self.layer, q, k, v), residual)

    def pack(self, packing: Packing, factor: Tensor, rope: RotaryEmbedding) -> None:
        """Lay the weights out for the CPU, for inputs times `factor` and in the order of pairs of `rope`."""
        turned, qkv = self.heads + self.kv_heads, self.qkv_proj
        qkv.weight.data = rope.interleave(qkv.weight.data, turned)
        if qkv.bias is not None:
            qkv.bias.data = rope.interleave(qkv.bias.data, turned)
        for head_norm in (self.q_norm, self.k_norm):
            if head_norm is not None:
                head_norm.weight.data = rope.interleave(head_norm.weight.data, 1)
        qkv.pack(packing, factor)
        self.o_proj.pack(packing)

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
        self, x: Tensor, rope: RotaryEmbedding, angles: tuple[Tensor, ...], attn: AttentionBackend
    ) -> Tensor:
        x = self.self_attn.forward_add(self.input_layernorm.forward(x), x, rope, angles, attn)
        return self.mlp.forward_add(self.post_attention_layernorm.forward(x), x)

    def pack(self, packing: Packing, rope: RotaryEmbedding) -> None:
        """Lay the weights out for the CPU."""
        keep = packing.keep_norm_weights
        self.self_attn.pack(packing, self.input_layernorm.fold(keep), rope)
        self.mlp.pack(packing, self.post_attention_layernorm.fold(keep))


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
        self.quantization: Quantization | None = None
        self._norm_factor: Tensor | None = None
        self.rope = RotaryEmbedding(config.rope, config.facts.head_dim, device)
        # memory is taken once, in the wanted dtype; the detour over meta costs a second of imports
        direct = dtype is torch.float32
        with torch.device(device if direct else "meta"):
            self.model = Decoder(config, traits)
            self.lm_head = Linear(config.hidden_size, config.facts.vocab_size, bias=False)
        if not direct:
            self.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """Run `batch`, writing its KV through `attn`.

        Returns logits [B, vocab] float32, row by request, of the rows `batch.logit_rows`.
        """
        attn.prepare(batch)
        x = self.hidden(batch.input_ids, batch.positions, attn)
        return self.logits(x.index_select(0, batch.logit_rows))

    @torch.inference_mode()
    def forward_hidden(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """Run `batch` as `forward` does; [T, hidden] float32 of all its rows, behind the final norm."""
        attn.prepare(batch)
        x = self.model.norm.forward(self.hidden(batch.input_ids, batch.positions, attn))
        return (x if self._norm_factor is None else x * self._norm_factor).float()

    def hidden(self, input_ids: Tensor, positions: Tensor, attn: AttentionBackend) -> Tensor:
        """[T] ids and positions -> [T, hidden] behind the last layer; `attn` knows the batch."""
        x = self.model.embed_tokens.forward(input_ids)
        angles = self.rope.angles(positions, x.dtype)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            x = layer.forward(x, self.rope, angles, attn)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab] float32."""
        return self.lm_head.forward(self.model.norm.forward(hidden)).float()

    def pack(self, quantization: Quantization | None = None) -> None:
        """Lay the weights out for the CPU, once (float32 only): all projections, the last one too, in one way."""
        packing = FLOAT32 if quantization is None else INT8
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.pack(packing, self.rope)
        self.rope.interleaved = True
        self._norm_factor = self.model.norm.fold(packing.keep_norm_weights)
        self.lm_head.pack(packing, self._norm_factor)
        self.quantization = quantization
