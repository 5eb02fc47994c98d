"""A real byte-level BPE whose tokens cut through characters, and one token a byte where asked."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SAMPLE = [
    "the ab cd. abab éé 中文字中文 日本語 👍🎉👍 \n\n  END ENX hello hello world",
    "中中文文字字 éüéü 🎉🎉",
]
EOS = "<eos>"


class ByteBpe:
    def __init__(self) -> None:
        self._bpe = Tokenizer(models.BPE())
        # no split into words, so that merges run across characters and spaces
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
        self._bpe.train_from_iterator(SAMPLE, trainer)
        self._of_byte = {byte: self._bpe.token_to_id(char) for byte, char in _byte_chars().items()}
        self._bpe.add_special_tokens([AddedToken(EOS)])
        self.eos = self._bpe.token_to_id(EOS)

    @property
    def vocab_size(self) -> int:
        size: int = self._bpe.get_vocab_size()
        return size

    def encode(self, text: str, merge: bool = True) -> list[int]:
        if not merge:
            return [self._of_byte[byte] for byte in text.encode()]
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self._bpe.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(
        self,
        list_of_ids: list[list[int]],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        texts: list[str] = self._bpe.decode_batch(list_of_ids, skip_special_tokens=skip_special_tokens)
        return texts


def _byte_chars() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
