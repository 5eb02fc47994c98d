"""The encoder against transformers, what its folder says of vectors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_bert import write_tiny_bert

from sgviz.batch.forward_mode import ForwardMode
from sgviz.errors import BadRequest, ConfigError, StartupError
from sgviz.messages.embedding import EmbeddingSpec
from sgviz.model.bert import BertModel
from sgviz.model.embedding_config import embedding_spec
from sgviz.model.fetch import data_dir
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.model_config import model_facts

PROMPTS = ([2, 5, 6, 7, 3], [2, 3], [2, *([4, 5, 6, 7, 8, 9, 10, 11, 12] * 4), 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


def whole_prompts(prompts: tuple[list[int], ...]) -> ForwardBatch:
    lens = [len(ids) for ids in prompts]
    return ForwardBatch.build(
        ForwardMode.EXTEND,
        input_ids=[token for ids in prompts for token in ids],
        prefix_lens=[0] * len(prompts),
        extend_lens=lens,
        out_cache_loc=np.zeros(sum(lens), dtype=np.int64),
        slot_table=np.zeros((len(prompts), max(lens)), dtype=np.int64),
    )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> BertModel:
    return BertModel.load(folder, dtype, torch.device("cpu"))


def test_hidden_states_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(folder).eval()
    hidden = load(folder).forward(whole_prompts(PROMPTS)).split([len(ids) for ids in PROMPTS])
    for ids, states in zip(PROMPTS, hidden):
        with torch.no_grad():
            wanted = reference(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(states, wanted, atol=1e-5, rtol=0)


def test_what_shares_the_forward_changes_no_bit(folder: Path) -> None:
    model = load(folder)
    together = model.forward(whole_prompts(PROMPTS)).split([len(ids) for ids in PROMPTS])
    for ids, states in zip(PROMPTS, together):
        assert torch.equal(model.forward(whole_prompts((ids,))), states)


def test_narrow_weights_give_nearly_the_same(folder: Path) -> None:
    exact, narrow = load(folder), load(folder, torch.bfloat16)
    batch = whole_prompts(PROMPTS)
    assert narrow.weight_bytes * 2 == exact.weight_bytes
    torch.testing.assert_close(narrow.forward(batch), exact.forward(batch), atol=0.1, rtol=0.1)


def test_a_prefix_before_all_names_is_taken_off(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(str(folder / "model.safetensors"))
    save_file(
        {f"bert.{name}": tensor for name, tensor in tensors.items()}, str(tmp_path / "model.safetensors")
    )
    batch = whole_prompts(PROMPTS)
    assert torch.equal(load(tmp_path).forward(batch), load(folder).forward(batch))
    del tensors["embeddings.LayerNorm.bias"]
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with pytest.raises(StartupError, match=r"missing are embeddings\.LayerNorm\.bias"):
        load(tmp_path)


def test_the_folder_says_how_it_pools(folder: Path, tmp_path: Path) -> None:
    assert embedding_spec(folder) == EmbeddingSpec(dim=32, pooling="mean", is_encoder=True)
    assert embedding_spec(folder, "cls").pooling == "cls"
    assert embedding_spec(write_tiny_bert(tmp_path / "plain", pooling=None)).pooling == "cls"
    assert model_facts(folder).context_len == 40
    with pytest.raises(StartupError, match=r"pooling_mode_max_tokens.*supported \(or set pooling\)"):
        embedding_spec(write_tiny_bert(tmp_path / "max", pooling="max_tokens"))


def test_a_decoder_pools_the_last_token_or_the_mean_but_never_the_first() -> None:
    folder = data_dir() / "tiny-llama"
    assert embedding_spec(folder) == EmbeddingSpec(dim=64, pooling="last")
    assert embedding_spec(folder, "mean").whole_prompt
    with pytest.raises(ConfigError, match="pooling 'cls' is for encoders"):
        embedding_spec(folder, "cls")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
    ],
)
def test_an_encoder_that_the_layers_cannot_do_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, str], told: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=told):
        load(tmp_path)


def test_dimensions_are_for_models_that_were_trained_for_them(tmp_path: Path) -> None:
    whole = EmbeddingSpec(dim=32)
    whole.check(None)
    whole.check(32)
    with pytest.raises(BadRequest, match="dimensions must be 32 or left out, got 16"):
        whole.check(16)
    any_length = embedding_spec(write_tiny_bert(tmp_path / "any", is_matryoshka=True))
    any_length.check(1)
    with pytest.raises(BadRequest, match="one of 1 to 32, got 33"):
        any_length.check(33)
    some = embedding_spec(write_tiny_bert(tmp_path / "some", matryoshka_dimensions=[8, 16]))
    some.check(8)
    with pytest.raises(BadRequest, match="one of 8, 16, got 9"):
        some.check(9)
