"""load_model: a Hugging Face folder of safetensors into a CausalLM. Mirrors SGLang's DefaultModelLoader.

Tensors stream one at a time from mapped files into their places, q, k, v and gate, up side by side; at the
end every place must be filled and no tensor be left over.
Imports: errors, model.decoder, model.registry, safetensors, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgviz.errors import StartupError, suggest
from sgviz.model.decoder import CausalLM
from sgviz.model.model_config import DecoderConfig, Quantization, load_config, read_json
from sgviz.model.registry import model_class

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes: rows first .. first + rows of `target`."""

    target: Tensor
    first: int
    rows: int

    @classmethod
    def whole(cls, target: Tensor) -> Place:
        """All of a parameter."""
        return cls(target.data, 0, target.shape[0])


def load_model(
    path: Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    *,
    pack: bool = True,
    quantization: Quantization | None = None,
) -> CausalLM:
    """Build the model in folder `path` and load its weights.

    Args:
        dtype: of the weights in memory; None for the folder's own.
        pack: in float32 on a CPU, lay projections out for oneDNN (about twice as quick, and a row's bits
            no longer depend on how many rows share the forward).
        quantization: "w8a8_int8" turns the projections to int8 (float32 on a CPU, packed, only).

    Raises:
        StartupError: unsupported architecture or dtype, a file missing or broken, or a tensor missing, left
            over or of another shape; the message names it.
    """
    config = load_config(path)
    kind = resolve_dtype(config.facts.dtype if dtype is None else dtype)
    model = model_class(config.facts.architecture)(config, kind, device)
    fill(
        _places(model, config),
        path,
        config.facts.architecture,
        redundant=lambda name: _is_redundant(name, config),
    )
    packable = pack and kind is torch.float32 and torch.device(device).type == "cpu"
    if quantization is not None and not packable:
        raise StartupError(
            f"quantization {quantization!r} runs in float32 on a CPU, not in {str(kind).removeprefix('torch.')}"
            f" on {torch.device(device).type}"
        )
    if packable:
        model.pack(quantization)
    return model


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """ "float32" and its like, or a torch dtype, as a torch dtype. Raises StartupError for any other."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise StartupError(
            f"dtype {dtype!r} is not supported{suggest(str(dtype), DTYPES)}; use one of {', '.join(DTYPES)}"
        )
    return found


def _places(model: CausalLM, config: DecoderConfig) -> dict[str, Place]:
    """Every checkpoint tensor the model needs, by its name there."""
    facts = config.facts
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    merged = {
        "qkv_proj": (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
        "gate_up_proj": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():  # a tied lm_head is listed once, as the embedding
        module = name.split(".")[-2]
        first = 0
        for part, rows in merged.get(module, ((module, parameter.shape[0]),)):
            places[name.replace(module, part)] = Place(parameter.data, first, rows)
            first += rows
    return places


def fill(
    places: dict[str, Place],
    path: Path,
    architecture: str,
    *,
    redundant: Callable[[str], bool],
    prefix: str = "",
) -> None:
    """Load the weights in folder `path` into their `places`.

    Args:
        redundant: names of the checkpoint that need no place. prefix: what some checkpoints put before every name.

    Raises:
        StartupError: a file is broken, or a tensor missing, left over or of another shape; the message names it.
    """
    missing, left_over = dict.fromkeys(places), []
    for own_name, tensor in _checkpoint(path):
        name = own_name.removeprefix(prefix)
        if name in missing:
            _copy(name, tensor, places[name], path)
            del missing[name]
        elif not redundant(name):
            left_over.append(name)
    if missing or left_over:
        raise StartupError(
            f"{path} does not hold a whole {architecture}: "
            f"missing are {_some(list(missing))}; without a place are {_some(left_over)}"
        )


def _copy(name: str, tensor: Tensor, place: Place, path: Path) -> None:
    target = place.target.narrow(0, place.first, place.rows)
    if tensor.shape != target.shape:
        have, need = list(tensor.shape), list(target.shape)
        raise StartupError(f"{path}: tensor {name} has shape {have}; the config asks for {need}")
    if target.is_floating_point() and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise StartupError(f"{path}: tensor {name} has dtype {kind}; weights must be floating-point numbers")
    target.copy_(tensor)


def _is_redundant(name: str, config: DecoderConfig) -> bool:
    """Tensors some checkpoints carry although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _checkpoint(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all weight files, one at a time."""
    for file in _weight_files(path):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StartupError(f"the weight file {file} cannot be read: {error}") from error


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / WEIGHTS_INDEX).exists():
        raise StartupError(
            f"{path} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; only safetensors can be loaded"
        )
    shards = read_json(path / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise StartupError(f"{path / WEIGHTS_INDEX} has no `weight_map` object")
    return [path / str(name) for name in sorted(set(shards.values()))]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) or "none"
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
