"""What a model is, by the JSON files of its folder: ModelFacts for planners, DecoderConfig for the layers.

Mirrors SGLang's ModelConfig over Hugging Face configs; only dense Llama-shaped decoders are described here, encoders
in `embedding_config`.
Older folders keep `rope_theta` and `rope_scaling` at the top, newer ones a `rope_parameters` object: both
are read.
Imports: errors. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar, cast

from sgviz.errors import StartupError, suggest

Number = TypeVar("Number", int, float)
JsonObject = Mapping[str, object]
Quantization = Literal["w8a8_int8"]

ENCODERS = ("BertModel",)
QWEN3_HEAD_DIM = 128  # Qwen3 folders may leave head_dim out; it isn't hidden_size / heads there


class RopeType(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base `theta` and, for the scaled kinds, how frequencies are stretched."""

    theta: float
    kind: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What stages outside the model need to know.

    Attributes:
        name: the folder's name.
        context_len: positions the model can address.
        eos_token_ids: ids that end an answer, config and generation config together.
        dtype: how the weights are stored ("float32", "bfloat16", "float16").
    """

    name: str
    architecture: str
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the layers are built from."""

    facts: ModelFacts
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def mark(self) -> str:
        """Equal for folders that describe the same layers, whatever they are called and however they are stored."""
        facts = replace(self.facts, name="", context_len=0, eos_token_ids=(), dtype="")
        layers = repr(replace(self, facts=facts)).encode()
        return f"{self.facts.architecture}-{hashlib.sha256(layers).hexdigest()[:8]}"


def model_facts(path: Path) -> ModelFacts:
    """The facts of the model in folder `path`. Raises StartupError for a folder that is none."""
    raw = read_json(path / "config.json")
    return facts_of(raw, path) if is_encoder(raw) else load_config(path).facts


def is_encoder(raw: JsonObject) -> bool:
    """A model whose tokens all see each other, by its config.json."""
    names = raw.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ENCODERS


def load_config(path: Path) -> DecoderConfig:
    """Read `config.json` (and `generation_config.json` if there is one) of folder `path`.

    Raises:
        StartupError: the file is missing or broken, or describes something the layers cannot do.
    """
    raw = read_json(path / "config.json")
    _refuse_unsupported(raw, path)
    return DecoderConfig(
        facts=facts_of(raw, path),
        hidden_size=number_in(raw, "hidden_size", int, path),
        intermediate_size=number_in(raw, "intermediate_size", int, path),
        rms_norm_eps=number_in(raw, "rms_norm_eps", float, path, default=1e-6),
        rope=_rope(raw, path),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def read_json(path: Path) -> JsonObject:
    """The JSON object in `path`. Raises StartupError with the file's name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"the model folder {path.parent} has no readable {path.name}: {error}") from error
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return cast(JsonObject, value)


def facts_of(raw: JsonObject, path: Path) -> ModelFacts:
    """The facts in `raw`, the config.json of folder `path`. Raises StartupError for one that is missing."""
    architecture, hidden = architecture_of(raw, path), number_in(raw, "hidden_size", int, path)
    heads = number_in(raw, "num_attention_heads", int, path)
    default_dim = QWEN3_HEAD_DIM if architecture.startswith("Qwen3") else hidden // heads
    return ModelFacts(
        name=path.resolve().name,
        architecture=architecture,
        vocab_size=number_in(raw, "vocab_size", int, path),
        context_len=number_in(raw, "max_position_embeddings", int, path, default=2048),
        eos_token_ids=_eos_ids(raw, path),
        num_layers=number_in(raw, "num_hidden_layers", int, path),
        num_heads=heads,
        num_kv_heads=number_in(raw, "num_key_value_heads", int, path, default=heads),
        head_dim=number_in(raw, "head_dim", int, path, default=default_dim),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def architecture_of(raw: JsonObject, path: Path) -> str:
    """The one class name of a config. Raises StartupError for none or several."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise StartupError(f"{path / 'config.json'}: `architectures` is {names!r}; one class name is needed")
    return str(names[0])


def number_in(
    raw: JsonObject, key: str, kind: type[Number], path: Path, default: Number | None = None
) -> Number:
    """`raw[key]` as `kind`; null counts as absent."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StartupError(f"{path / 'config.json'}: `{key}` is {value!r}; a number is needed")
    return kind(value)


def _eos_ids(raw: JsonObject, path: Path) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    sources = [raw, read_json(generation)] if generation.exists() else [raw]
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                ids[token] = None
    return tuple(ids)


def _rope(raw: JsonObject, path: Path) -> RopeConfig:
    own = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(own, dict):
        raise StartupError(f"{path / 'config.json'}: the rope settings are {own!r}; an object is needed")
    merged = {"rope_theta": raw.get("rope_theta"), **own}
    kind = str(own.get("rope_type") or own.get("type") or "default")
    if kind not in tuple(RopeType):
        known = ", ".join(RopeType)
        raise StartupError(
            f"{path / 'config.json'}: rope type {kind!r} is not supported; supported are {known}"
        )
    if own.get("partial_rotary_factor", 1.0) != 1.0:
        raise StartupError(f"{path / 'config.json'}: rotary embedding of a part of the head is not supported")
    context = number_in(raw, "max_position_embeddings", int, path, default=2048)
    return RopeConfig(
        theta=number_in(merged, "rope_theta", float, path, default=10000.0),
        kind=RopeType(kind),
        factor=number_in(own, "factor", float, path, default=1.0),
        low_freq_factor=number_in(own, "low_freq_factor", float, path, default=1.0),
        high_freq_factor=number_in(own, "high_freq_factor", float, path, default=4.0),
        original_context_len=number_in(own, "original_max_position_embeddings", int, path, default=context),
    )


def _refuse_unsupported(raw: JsonObject, path: Path) -> None:
    file = path / "config.json"
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise StartupError(
            f"{file}: hidden_act {act!r} is not supported{suggest(str(act), ['silu'])}; only silu is"
        )
    if raw.get("use_sliding_window"):
        raise StartupError(f"{file}: sliding window attention is not supported; only full attention is")
    if raw.get("quantization_config"):
        raise StartupError(f"{file}: quantized weights are not supported; use the unquantized model")
