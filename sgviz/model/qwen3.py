"""Qwen3: Llama with a norm over each query and key head. Imports: model.decoder."""

from __future__ import annotations

import torch

from sgviz.model.decoder import CausalLM, DecoderTraits
from sgviz.model.model_config import DecoderConfig


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        bias = config.attention_bias
        super().__init__(config, DecoderTraits(qkv_bias=bias, out_bias=bias, qk_norm=True), dtype, device)
