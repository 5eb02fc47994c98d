"""Which ids of a vocabulary read like text. Imports: model.tokenizer (no torch)."""

from __future__ import annotations

from sgviz.model.tokenizer import Tokenizer

LEAST_WORDS = 64  # a vocabulary with fewer whole words is one of letters


def text_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids whose text is a word with a space before it and that come back alone when it is encoded.

    A row of such ids reads like words, and its text has exactly as many tokens. Where a vocabulary has next to
    none (letters or bytes only): ids that decode to printable characters, tags such as <think> left out. Ascending.
    """
    special = frozenset(tokenizer.all_special_ids)
    ids = [i for i in range(tokenizer.vocab_size) if i not in special]
    texts = tokenizer.decode_batch([[i] for i in ids])
    words = [(i, text) for i, text in zip(ids, texts) if _is_word(text)]
    again = tokenizer.encode_batch([text for _, text in words], add_special_tokens=False)
    whole = [i for (i, _), found in zip(words, again) if found == [i]]
    if len(whole) >= LEAST_WORDS:
        return whole
    return [i for i, text in zip(ids, texts) if _is_plain(text)]


def _is_word(text: str) -> bool:
    return (
        len(text) > 2 and text[0] == " " and text[1:].isascii() and text[1:].isalpha() and text[1:].islower()
    )


def _is_plain(text: str) -> bool:
    return bool(text) and text.isprintable() and "\ufffd" not in text and not text.startswith("<")
