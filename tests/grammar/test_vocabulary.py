"""The bytes of a vocabulary: as llguidance reads them out of tokenizer.json itself, and as texts are written."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from sgviz.errors import BadRequest
from sgviz.grammar.vocabulary import Vocabulary
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer

TINY = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")


def built(pieces: Sequence[str], decoder: decoders.Decoder | None, model: str = "bpe") -> Tokenizer:
    ids = {piece: place for place, piece in enumerate(pieces)}
    made = (
        models.BPE(vocab=ids, merges=[]) if model == "bpe" else models.WordPiece(vocab=ids, unk_token="[UNK]")
    )
    backend = Backend(made)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, {}, {})


@pytest.mark.parametrize("name", TINY)
def test_the_bytes_are_those_that_llguidance_finds_in_the_file(name: str) -> None:
    path = resolve_model(name)
    tokenizer = Tokenizer.load(path)
    own = Vocabulary.of(tokenizer, tokenizer.vocab_size + 7)
    theirs = LLTokenizer((path / "tokenizer.json").read_text(), eos_token=2, slices=[])
    for token_id in range(tokenizer.vocab_size):
        assert own.tokens[token_id] == theirs.decode_bytes([token_id]), token_id
    assert list(own.tokens[tokenizer.vocab_size :]) == [b""] * 7
    assert sorted(own.special.values()) == sorted(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", TINY)
def test_the_bytes_of_a_text_s_ids_are_the_text(name: str) -> None:
    tokenizer = Tokenizer.load(resolve_model(name))
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    for text in ('{"a": [1, -2.5e3]}', "  naïve \n\t 東京 🙂", "<think>x</think>"):
        assert b"".join(vocabulary.tokens[i] for i in vocabulary.encode(text)).decode() == text


def test_sentencepiece_writes_spaces_and_bytes_in_its_own_way() -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = built(["<0x0A>", "▁the", "ab", "<0xC3>", "é"], decoders.Sequence(steps))
    assert tokenizer.decoder_types == ("Replace", "ByteFallback", "Fuse", "Strip")
    vocabulary = Vocabulary.of(tokenizer, 6)
    assert list(vocabulary.tokens) == [b"\n", b" the", b"ab", b"\xc3", "é".encode(), b"</s>"]
    assert vocabulary.special == {"</s>": 5}


def test_a_model_with_fewer_rows_than_tokens_knows_the_first_ones() -> None:
    tokenizer = built(["a", "b"], decoders.ByteLevel())
    vocabulary = Vocabulary.of(tokenizer, 2)
    assert list(vocabulary.tokens) == [b"a", b"b"] and vocabulary.special == {}


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_way_of_writing_that_is_not_known_is_told(decoder: decoders.Decoder | None) -> None:
    tokenizer = built(["[UNK]", "a", "##b"], decoder, model="wordpiece")
    with pytest.raises(BadRequest, match="for which no grammar can be applied"):
        Vocabulary.of(tokenizer, 4)
