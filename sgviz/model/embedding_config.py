"""What a model folder says of its vectors: size, pooling, whether they may be cut; and what an encoder is built from.

Reads config.json and, of sentence-transformers folders, 1_Pooling/config.json. Mirrors what SGLang's ModelConfig and
Pooler take from the architecture; simplified: encoders are plain BERT with absolute positions, and every vector is
normalised. Imports: errors, messages (the spec), model.model_config. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sgviz.errors import ConfigError, StartupError
from sgviz.messages.embedding import EmbeddingSpec, Pooling
from sgviz.model.model_config import (
    JsonObject,
    ModelFacts,
    architecture_of,
    facts_of,
    is_encoder,
    number_in,
    read_json,
)

POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
PoolingSetting = Literal["auto", "last", "mean", "cls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """What the layers of a BERT encoder are built from."""

    facts: ModelFacts
    hidden_size: int
    intermediate_size: int
    layer_norm_eps: float
    type_vocab_size: int


def embedding_spec(path: Path, pooling: PoolingSetting = "auto") -> EmbeddingSpec:
    """How the model in folder `path` makes vectors, with `pooling` as the user set it.

    Raises:
        StartupError: the folder is none, or asks for a pooling that there is not. ConfigError: `cls` for a decoder.
    """
    raw = read_json(path / "config.json")
    encoder = is_encoder(raw)
    chosen = (_own_pooling(path) or ("cls" if encoder else "last")) if pooling == "auto" else pooling
    if chosen == "cls" and not encoder:
        raise ConfigError(
            f"pooling 'cls' is for encoders: in {architecture_of(raw, path)} the first token sees nothing but itself; "
            "use last or mean",
            param="pooling",
        )
    sizes = raw.get("matryoshka_dimensions")
    return EmbeddingSpec(
        dim=number_in(raw, "hidden_size", int, path),
        pooling=chosen,
        is_encoder=encoder,
        matryoshka=bool(raw.get("is_matryoshka")) or bool(sizes),
        matryoshka_dimensions=tuple(int(size) for size in sizes) if isinstance(sizes, list) else (),
    )


def load_encoder_config(path: Path) -> EncoderConfig:
    """Raises StartupError for a folder that is no encoder, or one that the layers cannot do."""
    raw = read_json(path / "config.json")
    file, act = path / "config.json", raw.get("hidden_act", "gelu")
    if act != "gelu":
        raise StartupError(f"{file}: hidden_act {act!r} is not supported in an encoder; only gelu is")
    kind = raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise StartupError(f"{file}: position_embedding_type {kind!r} is not supported; only absolute is")
    return EncoderConfig(
        facts=facts_of(raw, path),
        hidden_size=number_in(raw, "hidden_size", int, path),
        intermediate_size=number_in(raw, "intermediate_size", int, path),
        layer_norm_eps=number_in(raw, "layer_norm_eps", float, path, default=1e-12),
        type_vocab_size=number_in(raw, "type_vocab_size", int, path, default=2),
    )


def _own_pooling(path: Path) -> Pooling | None:
    """What the folder's pooling module does; None if it has none."""
    file = path / "1_Pooling" / "config.json"
    if not file.exists():
        return None
    config: JsonObject = read_json(file)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        known = ", ".join(POOLING_MODES)
        raise StartupError(f"{file} asks for {modes}; one of {known} is supported (or set pooling)")
    return POOLING_MODES[modes[0]]
