"""BertModel: an encoder. Every token of a prompt sees all others, so there is no mask, no KV and no next token.

Mirrors SGLang's BertModel without its head for classification. Simplified: each prompt is one sentence (token type
0), and attention runs prompt by prompt, so a vector does not depend on what shares the forward.
Imports: model.embedding_config, forward_batch, layers, loader, torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgviz.model.embedding_config import EncoderConfig, load_encoder_config
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.layers import Linear, empty_parameter
from sgviz.model.loader import Place, fill
from sgviz.model.packed_linear import FLOAT32

UNUSED = (
    "pooler.",
    "embeddings.position_ids",
)  # of checkpoints: a head for other tasks, and a range of numbers
PREFIX = "bert."


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class EncoderLayer(nn.Module):
    """Attention and MLP, each with a norm behind its residual."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.heads, self.dim = config.facts.num_heads, config.facts.head_dim
        self.qkv = Linear(hidden, 3 * hidden, bias=True)
        self.attention_out = Linear(hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(hidden, eps)
        self.intermediate = Linear(hidden, config.intermediate_size, bias=True)
        self.output = Linear(config.intermediate_size, hidden, bias=True)
        self.output_norm = LayerNorm(hidden, eps)

    def forward(self, x: Tensor, lens: list[int]) -> Tensor:
        """[T, hidden] of prompts of `lens` tokens -> [T, hidden]."""
        qkv = self.qkv.forward(x).unflatten(-1, (3, self.heads, self.dim)).permute(1, 2, 0, 3)
        attended = torch.cat([self._attend(part) for part in qkv.split(lens, dim=2)])
        x = self.attention_norm.forward(self.attention_out.forward_add(attended, x))
        middle = F.gelu(self.intermediate.forward(x))
        return self.output_norm.forward(self.output.forward_add(middle, x))

    def _attend(self, qkv: Tensor) -> Tensor:
        """[3, heads, n, dim] of one prompt -> [n, hidden]."""
        return F.scaled_dot_product_attention(*qkv.unsqueeze(1)).squeeze(0).transpose(0, 1).flatten(1)

    def pack(self) -> None:
        """Lay the weights out for the CPU."""
        for linear in (self.qkv, self.attention_out, self.intermediate, self.output):
            linear.pack(FLOAT32)


class BertModel(nn.Module):
    """Embeddings and layers. `load` makes one from a folder; `weight_bytes` is what its weights take."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.weight_bytes = 0
        facts, hidden = config.facts, config.hidden_size
        self.words = empty_parameter(facts.vocab_size, hidden)
        self.positions = empty_parameter(facts.context_len, hidden)
        self.token_types = empty_parameter(config.type_vocab_size, hidden)
        self.norm = LayerNorm(hidden, config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(facts.num_layers))

    @staticmethod
    def load(path: Path, dtype: torch.dtype, device: torch.device) -> BertModel:
        """The model in folder `path`. Raises StartupError if a tensor is missing, left over or of another shape."""
        config = load_encoder_config(path)
        with torch.device(device):
            model = BertModel(config).to(dtype)
        model.weight_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        fill(model._places(), path, config.facts.architecture, redundant=_is_unused, prefix=PREFIX)
        if dtype is torch.float32 and device.type == "cpu":
            for layer in model.layers:
                assert isinstance(layer, EncoderLayer)
                layer.pack()
        return model

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden] float32: whole prompts (their slots are not looked at) to the states behind the last layer."""
        x = F.embedding(batch.input_ids, self.words) + F.embedding(batch.positions, self.positions)
        x = self.norm.forward(x + self.token_types[0])
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            x = layer.forward(x, batch.extend_lens)
        return x.float()

    def _places(self) -> dict[str, Place]:
        """Every checkpoint tensor the model needs, by its name there."""
        whole: dict[str, Tensor] = {
            "embeddings.word_embeddings.weight": self.words,
            "embeddings.position_embeddings.weight": self.positions,
            "embeddings.token_type_embeddings.weight": self.token_types,
            "embeddings.LayerNorm.weight": self.norm.weight,
            "embeddings.LayerNorm.bias": self.norm.bias,
        }
        places = {name: Place.whole(tensor) for name, tensor in whole.items()}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            places.update(_layer_places(f"encoder.layer.{number}.", layer))
        return places


def _layer_places(prefix: str, layer: EncoderLayer) -> dict[str, Place]:
    parts: dict[str, Linear | LayerNorm] = {
        "attention.output.dense": layer.attention_out,
        "attention.output.LayerNorm": layer.attention_norm,
        "intermediate.dense": layer.intermediate,
        "output.dense": layer.output,
        "output.LayerNorm": layer.output_norm,
    }
    places: dict[str, Place] = {}
    for name, part in parts.items():
        assert part.bias is not None
        places[f"{prefix}{name}.weight"] = Place.whole(part.weight)
        places[f"{prefix}{name}.bias"] = Place.whole(part.bias)
    size = layer.heads * layer.dim
    for number, name in enumerate(("query", "key", "value")):
        for kind, tensor in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
            assert tensor is not None
            places[f"{prefix}attention.self.{name}.{kind}"] = Place(tensor.data, number * size, size)
    return places


def _is_unused(name: str) -> bool:
    return name.startswith(UNUSED)
