"""Loading says what is wrong with a folder; whatever is whole loads, in one file or several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgviz.errors import StartupError
from sgviz.model.fetch import resolve_model
from sgviz.model.loader import load_model
from sgviz.model.model_config import ModelFacts, RopeType, load_config, model_facts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(resolve_model("tiny-qwen2"), copy)
    return copy


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_facts() -> None:
    assert model_facts(resolve_model("tiny-qwen3")) == ModelFacts(
        name="tiny-qwen3",
        architecture="Qwen3ForCausalLM",
        vocab_size=312,
        context_len=2048,
        eos_token_ids=(2,),
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        dtype="bfloat16",
    )


def test_parts_lie_where_the_merged_matrices_say(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    loaded = dict(load_model(folder, pack=False).named_parameters())
    for kind in ("weight", "bias"):
        qkv = torch.cat([weights[f"model.layers.2.self_attn.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(loaded[f"model.layers.2.self_attn.qkv_proj.{kind}"], qkv)
    gate_up = torch.cat([weights[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(loaded["model.layers.1.mlp.gate_up_proj.weight"], gate_up)


def test_tied_embeddings_are_one_tensor(folder: Path) -> None:
    model = load_model(folder, pack=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = load_model(resolve_model("tiny-llama"), pack=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_sharded_checkpoint_equals_a_single_file(folder: Path) -> None:
    expected = load_model(folder, pack=False).state_dict()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_model(folder, pack=False).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00002-of-00002.safetensors cannot be read"):
        load_model(folder)


def test_redundant_tensors_are_passed_over(folder: Path) -> None:
    def add(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_weights(folder, add)
    load_model(folder)


def test_a_missing_and_a_strange_tensor_are_named(folder: Path) -> None:
    def swap(weights: dict[str, Tensor]) -> None:
        weights["model.layers.9.mlp.up_proj.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")

    change_weights(folder, swap)
    with pytest.raises(StartupError) as caught:
        load_model(folder)
    assert "missing are model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "without a place are model.layers.9.mlp.up_proj.weight" in str(caught.value)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    change_config(folder, intermediate_size=96)
    with pytest.raises(StartupError, match=r"mlp.*proj.weight has shape .*128.*asks for .*96"):
        load_model(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLN"]}, r"did you mean 'Qwen2ForCausalLM'.*LlamaForCausalLM"),
        ({"architectures": []}, "one class name"),
        ({"hidden_size": "big"}, "`hidden_size` is 'big'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'.*llama3"),
    ],
)
def test_what_the_layers_cannot_do_is_refused(folder: Path, values: dict[str, Any], words: str) -> None:
    change_config(folder, **values)
    with pytest.raises(StartupError, match=words):
        load_model(folder)


def test_broken_and_missing_files(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"dtype 'float33'.*did you mean 'float32'"):
        load_model(folder, dtype="float33")
    (folder / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(StartupError, match="cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="only safetensors"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(StartupError, match="not valid JSON"):
        load_model(folder)


def test_both_forms_of_rope_settings_mean_the_same(folder: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    change_config(folder, rope_theta=500000.0, rope_scaling=scaling)
    older = load_config(folder).rope
    change_config(
        folder, rope_theta=None, rope_scaling=None, rope_parameters={**scaling, "rope_theta": 500000.0}
    )
    assert load_config(folder).rope == older
    assert older.kind is RopeType.LLAMA3 and older.theta == 500000.0 and older.original_context_len == 1024


def test_end_ids_come_from_both_configs(folder: Path) -> None:
    change_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 5]}))
    assert model_facts(folder).eos_token_ids == (7, 2, 5)
