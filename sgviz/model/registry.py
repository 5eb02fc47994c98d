"""Which class runs which architecture. Mirrors SGLang's ModelRegistry.

Imports: model.llama, model.qwen2, model.qwen3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from sgviz.errors import StartupError, suggest
from sgviz.model.decoder import CausalLM
from sgviz.model.llama import LlamaForCausalLM
from sgviz.model.model_config import DecoderConfig
from sgviz.model.qwen2 import Qwen2ForCausalLM
from sgviz.model.qwen3 import Qwen3ForCausalLM

ModelClass = Callable[[DecoderConfig, torch.dtype, torch.device | str], CausalLM]

ARCHITECTURES: Mapping[str, ModelClass] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
    }
)


def model_class(architecture: str) -> ModelClass:
    """The class for `architecture`, as configs name it. Raises StartupError if there is none."""
    found = ARCHITECTURES.get(architecture)
    if found is None:
        near, known = suggest(architecture, ARCHITECTURES), ", ".join(ARCHITECTURES)
        raise StartupError(f"architecture {architecture!r} is not supported{near}; supported are {known}")
    return found
