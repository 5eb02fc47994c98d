"""A GGUF file into a Hugging Face folder: float32 safetensors, configs and a fast tokenizer.

GGUF stores the weights of Llama-shaped models quantized, under names of its own and with the rows of q and k
reordered for interleaved rotary embedding; all of that is undone here, once. Only what the packaged model
needs is covered: architecture "llama" with the byte-level BPE of SmolLM.
Imports: errors, gguf, safetensors (numpy), tokenizers. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sgviz.errors import StartupError

Step = Callable[[int, int], None]  # (tensors done, tensors in all)
Weights = npt.NDArray[np.float32]

CONTROL_TOKEN = 3  # GGUF's token type for special tokens
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(source: Path, target: Path, step: Step) -> None:
    """Write the model in GGUF file `source` as an existing, empty folder `target`.

    Raises:
        StartupError: the file is of another architecture or tokenizer, or has a tensor of unknown name.
    """
    reader = gguf.GGUFReader(str(source))
    _expect(reader, "general.architecture", "llama", source)
    _expect(reader, "tokenizer.ggml.model", "gpt2", source)
    _expect(reader, "tokenizer.ggml.pre", "smollm", source)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", _config(reader, tied))
    _write_json(target / "generation_config.json", {**_token_ids(reader), "_from_model_config": True})
    _tokenizer(reader).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(reader))
    _write_weights(reader, target / "model.safetensors", step)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    """The value of metadata `key`; GGUF values are of any type."""
    field = reader.get_field(key)
    if field is None:
        raise StartupError(f"the GGUF file has no {key}")
    return field.contents()


def _expect(reader: gguf.GGUFReader, key: str, value: str, source: Path) -> None:
    if (found := _field(reader, key)) != value:
        raise StartupError(f"{source}: {key} is {found!r}; only {value!r} can be converted")


def _config(reader: gguf.GGUFReader, tied: bool) -> dict[str, object]:
    heads = int(_field(reader, "llama.attention.head_count"))
    hidden = int(_field(reader, "llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "rms_norm_eps": _decimal(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(_field(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **_token_ids(reader),
    }


def _decimal(value: float) -> float:
    """The decimal a stored float32 was written from: 9.99999974e-06 is 1e-05."""
    return float(f"{value:.7g}")


def _token_ids(reader: gguf.GGUFReader) -> dict[str, int]:
    return {
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
    }


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Byte-level BPE that takes every digit by itself, as SmolLM does."""
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(line.split(" ")) for line in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _control(reader)]
    )
    return tokenizer


def _control(reader: gguf.GGUFReader) -> list[str]:
    kinds = _field(reader, "tokenizer.ggml.token_type")
    return [
        text for text, kind in zip(_field(reader, "tokenizer.ggml.tokens"), kinds) if kind == CONTROL_TOKEN
    ]


def _tokenizer_config(reader: gguf.GGUFReader) -> dict[str, object]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    named = {
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
    }
    return {
        **named,
        "additional_special_tokens": [text for text in _control(reader) if text not in named.values()],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(_field(reader, "llama.context_length")),
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_weights(reader: gguf.GGUFReader, file: Path, step: Step) -> None:
    weights: dict[str, Weights] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        dense = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[_tensor_name(tensor.name)] = _restore_rows(reader, tensor.name, dense)
        step(done, len(reader.tensors))
    save_file(weights, str(file), metadata={"format": "pt"})


def _tensor_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    known = TENSOR_NAMES.get(parts[-2])
    if known is None:
        raise StartupError(f"the GGUF file has a tensor {name!r}, which a Llama model has no place for")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{known}.{parts[-1]}"


def _restore_rows(reader: gguf.GGUFReader, name: str, dense: Weights) -> Weights:
    """GGUF pairs rotary rows as neighbours; Hugging Face pairs row i of a head with row i + half."""
    heads_key = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    key = heads_key.get(name.split(".")[-2])
    if key is None:
        return np.ascontiguousarray(dense)
    heads, columns = int(_field(reader, key)), dense.shape[1]
    pairs = dense.reshape(heads, dense.shape[0] // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(dense.shape))


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
