"""Qwen2 and 2.5: Llama with a bias on q, k and v. Imports: model.decoder."""

from __future__ import annotations

import torch

from sgviz.model.decoder import CausalLM, DecoderTraits
from sgviz.model.model_config import DecoderConfig


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, DecoderTraits(qkv_bias=True), dtype, device)
