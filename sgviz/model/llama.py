"""Llama: the plain decoder (Llama 2 and 3, SmolLM2). Imports: model.decoder."""

from __future__ import annotations

import torch

from sgviz.model.decoder import CausalLM, DecoderTraits
from sgviz.model.model_config import DecoderConfig


class LlamaForCausalLM(CausalLM):
    """`attention_bias` of the config puts a bias on all four projections of attention."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        bias = config.attention_bias
        super().__init__(config, DecoderTraits(qkv_bias=bias, out_bias=bias), dtype, device)
