"""A random two-layer Llama as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 32, 4, 2, 64, 2
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "he",
    "Ġt",
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_tiny_gguf(file: Path, architecture: str = "llama") -> dict[str, npt.NDArray[np.float32]]:
    """Write `file`; gives the weights under their Hugging Face names, before any reordering."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer)
    weights = _weights()
    for name, (_, array) in weights.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, _interleave(array, heads) if heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(weights.values())


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _weights() -> dict[str, tuple[str, npt.NDArray[np.float32]]]:
    """GGUF name -> (Hugging Face name, values)."""
    rng = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    shapes = {
        "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
        "attn_k": ("self_attn.k_proj", (KV_HEADS * head_dim, HIDDEN)),
        "attn_v": ("self_attn.v_proj", (KV_HEADS * head_dim, HIDDEN)),
        "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
        "ffn_gate": ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
        "ffn_up": ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
        "ffn_down": ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
        "attn_norm": ("input_layernorm", (HIDDEN,)),
        "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    }
    found = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    }
    for layer in range(LAYERS):
        for name, (hf_name, shape) in shapes.items():
            found[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{hf_name}.weight", shape)
    return {
        name: (hf_name, rng.standard_normal(shape).astype(np.float32))
        for name, (hf_name, shape) in found.items()
    }


def _interleave(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Row i and row i + half of a head become neighbours, as llama.cpp's rotary embedding wants them."""
    rows = [array[head * (len(array) // heads) :][: len(array) // heads] for head in range(heads)]
    half = len(rows[0]) // 2
    return np.concatenate([np.stack([block[i], block[i + half]]) for block in rows for i in range(half)])
