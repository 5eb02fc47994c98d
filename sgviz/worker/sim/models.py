"""Shapes of the models that can be simulated, as their config.json states them. Imports: errors."""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """A dense decoder with grouped heads and a gated MLP.

    Attributes:
        tied: the output matrix is the embedding table.
        tp: GPUs it is spread over if nobody says otherwise.
        itemsize: bytes of a weight and of a KV number (2: bf16, 1: fp8).
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_len: int
    tied: bool = False
    tp: int = 1
    itemsize: int = 2

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def read_weights(self) -> int:
        """Numbers that every forward reads: all layers and the output matrix (of the embedding only rows)."""
        return self.layers * self.layer_weights + self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        return (self.read_weights + embedding) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


MODELS: tuple[SimModel, ...] = (
    SimModel(
        name="llama-3-8b", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128,
        vocab=128256, context_len=8192,
    ),
    SimModel(
        name="llama-3-70b", layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128,
        vocab=128256, context_len=8192, tp=4,
    ),
    SimModel(
        name="llama-2-7b", layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128,
        vocab=32000, context_len=4096,
    ),
    SimModel(
        name="llama-2-70b", layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128,
        vocab=32000, context_len=4096, tp=4,
    ),
    SimModel(
        name="qwen2.5-7b", layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128,
        vocab=152064, context_len=32768,
    ),
    SimModel(
        name="qwen2.5-0.5b", layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64,
        vocab=151936, context_len=32768, tied=True,
    ),
    SimModel(
        name="smollm2-135m", layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64,
        vocab=49152, context_len=8192, tied=True,
    ),
)  # fmt: skip


def find_model(name: str) -> SimModel:
    """The shape of that name. ConfigError for any other."""
    for model in MODELS:
        if model.name == name:
            return model
    known = [model.name for model in MODELS]
    raise ConfigError(
        f"there is no simulated model {name!r}{suggest(name, known)}; there are {', '.join(known)}",
        param="sim_model",
    )
