"""Vocabulary: what a grammar must know of a tokenizer, above all the bytes that each id adds to a text.

Two ways of writing bytes into a vocabulary are known: the byte-level alphabet of GPT-2 (Llama 3, Qwen, SmolLM)
and SentencePiece's, with `▁` for a space and `<0x0A>` for a byte. SGLang leaves this to its backends.
Imports: errors, model.tokenizer (no torch).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sgviz.errors import BadRequest
from sgviz.model.tokenizer import Tokenizer

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
NEVER = b"\xff"  # in no text in UTF-8; to backends it marks special tokens
SPACE_PIECE = "\u2581"
PRINTABLE = (
    range(0x21, 0x7F),
    range(0xA1, 0xAD),
    range(0xAE, 0x100),
)  # bytes the alphabet writes as themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary as bytes.

    Attributes:
        tokens: by id; empty for an id without text (a model may have more rows than its tokenizer has tokens).
        special: text of the special tokens, which no text can contain, and their ids.
        encode: text to ids, without special tokens around it.
    """

    tokens: Sequence[bytes]
    special: Mapping[str, int]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """That of `tokenizer`, for a model with `vocab_size` rows.

        Raises:
            BadRequest: its tokens are written in a way that is not known here.
        """
        added = tokenizer.added_tokens()
        piece_bytes = _reader(tokenizer.decoder_types)
        tokens = [b""] * vocab_size
        for token_id in range(min(vocab_size, tokenizer.vocab_size)):
            piece = tokenizer.id_to_token(token_id)
            if piece is not None:
                text = piece.encode() if token_id in added else piece_bytes(piece)
                tokens[token_id] = b"" if NEVER in text else text
        special = {tokenizer.id_to_token(i) or "": i for i in tokenizer.all_special_ids if i < vocab_size}
        return cls(
            tokens=tokens,
            special={text: token_id for text, token_id in special.items() if text},
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )


def _reader(decoders: Sequence[str]) -> Callable[[str], bytes]:
    """How a piece of this vocabulary becomes bytes."""
    if "ByteLevel" in decoders:
        table = _alphabet()
        return lambda piece: bytes(table[char] for char in piece) if all(c in table for c in piece) else b""
    if "Metaspace" in decoders or "ByteFallback" in decoders:
        return _sentencepiece
    raise BadRequest(
        "this model's tokenizer writes its tokens in a way for which no grammar can be applied "
        f"(decoder {' + '.join(decoders) or 'none'}; known are ByteLevel, Metaspace and ByteFallback)"
    )


def _alphabet() -> dict[str, int]:
    """Character -> byte: printable bytes are themselves, the others follow from U+0100 on in order."""
    plain = [value for span in PRINTABLE for value in span]
    others = [value for value in range(256) if value not in set(plain)]
    table = {chr(value): value for value in plain}
    table.update({chr(0x100 + place): value for place, value in enumerate(others)})
    return table


def _sentencepiece(piece: str) -> bytes:
    found = BYTE_PIECE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece.replace(SPACE_PIECE, " ").encode()
