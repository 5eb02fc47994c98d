"""TextCodec: what the TokenizerManager needs of a tokenizer. Imports: standard library only."""

from __future__ import annotations

from typing import Protocol


class TextCodec(Protocol):
    """Text to ids and back."""

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        ids: list[int],
        /,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...
