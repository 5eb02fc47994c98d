"""Writes the tiny models beside this file: `python data/make_tiny.py`.

Three seeded random models (Llama, Qwen2, Qwen3) with one byte-level tokenizer, as Hugging Face folders that
load here and in transformers. They know nothing, but they are quick, need no network, and give every run
the same tokens; the tests and the lessons use them. Weights are drawn wide enough that the best token leads
clearly, so equal results do not hang on the last bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, CONTEXT = 4, 64, 4, 2, 128, 2048
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are shown as text
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
# Joined in this order; a text in English takes about two bytes a token, other characters one token a byte.
PAIRS = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "e r", "a t", "Ġ s", "o r", "e n", "Ġt he",
    "Ġ w", "n d", "i s", "e s", "Ġ o", "i t", "Ġ c", "o u", "Ġa nd", "Ġ b", "a l", "Ġ p",
    "Ġo f", "in g", "Ġt o", "Ġ f", "Ġ m", "Ġ in", "l l", "a r", "e d", "a n", "Ġ h", "o m",
    "l e", "Ġ d", "a s", "Ġ is", "s t", "r o", "i c", "Ġ l", "Ġ n", "Ġ y", "Ġ g", "Ġy ou",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Tiny:
    """One model: what its architecture adds, and its seed."""

    name: str
    architecture: str
    model_type: str
    seed: int
    head_dim: int = HIDDEN // HEADS
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False


TINY = (
    Tiny("tiny-llama", "LlamaForCausalLM", "llama", seed=1),
    Tiny("tiny-qwen2", "Qwen2ForCausalLM", "qwen2", seed=2, qkv_bias=True, tied=True),
    Tiny("tiny-qwen3", "Qwen3ForCausalLM", "qwen3", seed=3, head_dim=32, qk_norm=True),
)


def main(folder: Path) -> None:
    """Write all tiny models below `folder`."""
    tokenizer = byte_tokenizer()
    for tiny in TINY:
        target = folder / tiny.name
        target.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(target / "tokenizer.json"))
        _write_json(target / "tokenizer_config.json", tokenizer_config())
        _write_json(target / "config.json", model_config(tiny, tokenizer))
        _write_json(target / "generation_config.json", _token_ids(tokenizer))
        weights = dict(_weights(tiny, tokenizer.get_vocab_size()))
        save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE: special tokens, 256 bytes, then the joined PAIRS."""
    pairs = [(left, right) for left, right in (pair.split(" ") for pair in PAIRS)]
    pieces = [
        *CONTROL,
        *MARKS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(pair) for pair in pairs),
    ]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": ["<|endoftext|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config(tiny: Tiny, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": [tiny.architecture],
        "model_type": tiny.model_type,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": tiny.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tiny.tied,
        "dtype": "bfloat16",
        **_token_ids(tokenizer),
    }


def _token_ids(tokenizer: Tokenizer) -> dict[str, object]:
    named = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {name: tokenizer.token_to_id(token) for name, token in named.items()}


def _weights(tiny: Tiny, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, drawn in this order from one seeded generator."""
    rng = torch.Generator().manual_seed(tiny.seed)
    yield "model.embed_tokens.weight", _draw(rng, 0.5, vocab_size, HIDDEN)
    for layer in range(LAYERS):
        for name, weight in _layer(tiny, rng):
            yield f"model.layers.{layer}.{name}", weight
    yield "model.norm.weight", _around_one(rng, HIDDEN)
    if not tiny.tied:
        yield "lm_head.weight", _draw(rng, 0.5, vocab_size, HIDDEN)


def _layer(tiny: Tiny, rng: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    q_size, kv_size = HEADS * tiny.head_dim, KV_HEADS * tiny.head_dim
    yield "input_layernorm.weight", _around_one(rng, HIDDEN)
    yield "post_attention_layernorm.weight", _around_one(rng, HIDDEN)
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield f"self_attn.{name}.weight", _matrix(rng, size, HIDDEN, gain=1.5)
        if tiny.qkv_bias:
            yield f"self_attn.{name}.bias", _draw(rng, 0.3, size)
    yield "self_attn.o_proj.weight", _matrix(rng, HIDDEN, q_size, gain=2.0)
    if tiny.qk_norm:
        yield "self_attn.q_norm.weight", _around_one(rng, tiny.head_dim)
        yield "self_attn.k_norm.weight", _around_one(rng, tiny.head_dim)
    yield "mlp.gate_proj.weight", _matrix(rng, INTERMEDIATE, HIDDEN, gain=1.5)
    yield "mlp.up_proj.weight", _matrix(rng, INTERMEDIATE, HIDDEN, gain=1.5)
    yield "mlp.down_proj.weight", _matrix(rng, HIDDEN, INTERMEDIATE, gain=1.5)


def _matrix(rng: torch.Generator, out: int, inputs: int, gain: float) -> Tensor:
    """Keeps the scale of its input, times `gain`."""
    return _draw(rng, gain / math.sqrt(inputs), out, inputs)


def _around_one(rng: torch.Generator, size: int) -> Tensor:
    return (1 + 0.1 * torch.randn(size, generator=rng)).to(torch.bfloat16)


def _draw(rng: torch.Generator, std: float, *shape: int) -> Tensor:
    return (std * torch.randn(*shape, generator=rng)).to(torch.bfloat16)


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
