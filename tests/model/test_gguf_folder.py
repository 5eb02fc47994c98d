"""What comes out of a GGUF file is the model that went in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import write_tiny_gguf

from sgviz.errors import StartupError
from sgviz.model.gguf_folder import write_folder
from sgviz.model.loader import load_model
from sgviz.model.model_config import load_config
from sgviz.model.tokenizer import Tokenizer


def convert(tmp_path: Path, architecture: str = "llama") -> tuple[Path, dict[str, np.ndarray]]:
    weights = write_tiny_gguf(tmp_path / "model.gguf", architecture)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(tmp_path / "model.gguf", folder, lambda done, total: None)
    return folder, weights


def test_weights_come_back_under_their_names_and_in_their_order(tmp_path: Path) -> None:
    folder, weights = convert(tmp_path)
    found = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(weights)
    for name, expected in weights.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_the_folder_loads(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path)
    config = load_config(folder)
    assert config.rms_norm_eps == 1e-5 and config.rope.theta == 10000.0 and config.tie_word_embeddings
    assert config.facts.eos_token_ids == (2,) and config.facts.head_dim == 8
    assert load_model(folder).config == config


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path)
    tokenizer = Tokenizer.load(folder)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("he t12<|im_end|>")] == [
        "he",
        "Ġt",
        "1",
        "2",
        "<|im_end|>",
    ]
    assert tokenizer.all_special_ids == (0, 1, 2)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"general.architecture is 'gemma'; only 'llama'"):
        convert(tmp_path, "gemma")
