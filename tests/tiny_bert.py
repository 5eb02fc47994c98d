"""A small random BERT folder with a word tokenizer, as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
)


def write_tiny_bert(folder: Path, pooling: str | None = "mean_tokens", **config: Any) -> Path:
    """`pooling`: the mode in 1_Pooling/config.json; None: no such file."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    settings = {"vocab_size": len(WORDS), "max_position_embeddings": 40, **sizes, **config}
    BertModel(BertConfig(**settings)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)  # as sentence-transformers folders have it; it must not cut prompts here
    tokenizer.save(str(folder / "tokenizer.json"))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        modes = {
            f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")
        }
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return folder
