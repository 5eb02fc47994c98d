"""The tokenizer gives what transformers' gives, without importing it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgviz.errors import BadRequest, StartupError
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "What is the capital of France?",
    "  two  spaces\n\n\tand a tab \r\n",
    "naïve façade Ångström ß ﬁ",
    "日本語のテキスト、中文文本。 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b \ufeff \u0000",
    "pi = 3.14159, 1234567890, ٣٤٥, ½ x²",
    "I'll don't WE'VE it's",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nhi<|im_end|> <think>no</think><|unknown|>",
    "العربية עברית हिन्दी",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello  there\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "日本?"},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("tiny-llama")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def assert_equals_transformers(folder: Path) -> None:
    import transformers

    own, reference = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == reference.encode(text), text
        assert own.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert own.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
            assert own.decode(ids[1:], skip) == reference.decode(ids[1:], skip_special_tokens=skip), text
    for prompt in (True, False):
        expected = reference.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert own.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    assert own.vocab_size == len(reference)
    assert own.eos_token_id == reference.eos_token_id
    assert set(own.all_special_ids) == set(reference.all_special_ids)
    assert [own.id_to_token(i) for i in range(300)] == reference.convert_ids_to_tokens(list(range(300)))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_tiny_equals_transformers(name: str) -> None:
    assert_equals_transformers(resolve_model(name))


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    assert_equals_transformers(resolve_model("smollm2-135m-instruct"))


def test_the_tiny_models_share_one_tokenizer(folder: Path) -> None:
    for name in ("tiny-qwen2", "tiny-qwen3"):
        assert (resolve_model(name) / "tokenizer.json").read_bytes() == (
            folder / "tokenizer.json"
        ).read_bytes()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer.load(resolve_model("tiny-llama"))
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_batches_equal_single_calls(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == ids
    assert tokenizer.decode_batch(ids, skip_special_tokens=False) == TEXTS
    assert [tokenizer.count_tokens(text) for text in TEXTS] == [len(item) for item in ids]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    end, think = tokenizer.eos_token_id, tokenizer.token_to_id("<think>")
    assert end is not None and think is not None
    assert tokenizer.id_to_token(end) == "<|im_end|>"
    assert end in tokenizer.all_special_ids and think not in tokenizer.all_special_ids
    ids = tokenizer.encode("a<think>b<|im_end|>")
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think>b<|im_end|>"
    assert tokenizer.id_to_token(10**6) is None and tokenizer.id_to_token(-1) is None


def test_a_character_cut_in_two_shows_as_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    assert "\ufffd" in tokenizer.decode(ids[:-1])


def test_loading_and_chatting_import_neither_transformers_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sgviz.model.tokenizer import Tokenizer;"
        f"from sgviz.model.model_config import model_facts; model_facts(Path({str(folder)!r}));"
        f"Tokenizer.load(Path({str(folder)!r})).apply_chat_template([{{'role': 'user', 'content': 'x'}}]);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class TestChatTemplates:
    def test_own_template_sees_messages_and_variables(self, tokenizer: Tokenizer) -> None:
        source = "{{ eos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood | tojson }}"
        text = tokenizer.render_chat(CHAT[:1], chat_template=source, mood={"é": 1})
        assert text == '<|im_end|>[Be brief.]{"é": 1}'

    def test_generation_marks_and_loop_controls_are_understood(self, tokenizer: Tokenizer) -> None:
        source = (
            "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
            "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
        )
        assert tokenizer.render_chat(CHAT, chat_template=source) == "Be brief.;Hi.;"

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{% for %}", "does not parse"),
            ("{{ messages.append(1) }}", "refuses"),
            ("{{ ''.__class__.__mro__ }}", "refuses"),
        ],
    )
    def test_a_bad_template_is_a_bad_request(self, tokenizer: Tokenizer, source: str, words: str) -> None:
        with pytest.raises(BadRequest, match=words):
            tokenizer.render_chat(CHAT, chat_template=source)

    def test_no_messages(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(BadRequest, match="at least one message"):
            tokenizer.apply_chat_template([])

    def test_where_templates_are_read_from(self, folder: Path, tmp_path: Path) -> None:
        def load(config: dict[str, Any]) -> Tokenizer:
            shutil.copy(folder / "tokenizer.json", tmp_path)
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            return Tokenizer.load(tmp_path)

        without = load({"eos_token": {"content": "<|im_end|>"}})
        assert without.eos_token_id == 2 and not without.has_chat_template
        with pytest.raises(BadRequest, match="no chat template"):
            without.render_chat(CHAT)
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        several = load({"chat_template": named})
        assert several.render_chat(CHAT) == "plain"
        assert several.render_chat(CHAT, tools=[{"name": "f"}]) == "tools"
        (tmp_path / "chat_template.jinja").write_text("file")
        assert load({"chat_template": "config"}).render_chat(CHAT) == "file"


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match="cannot be read"):
        Tokenizer.load(tmp_path)
