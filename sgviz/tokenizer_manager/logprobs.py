"""Log-probabilities of one request as they arrive, and as `meta_info` shows them.

Mirrors `convert_logprob_style` of SGLang's TokenizerManager: an entry is (log-probability, token id, text or None).
Imports: messages, tokenizer_manager.codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgviz.messages import BatchStrOutput
from sgviz.messages.generate import TopLogprobs
from sgviz.tokenizer_manager.codec import TextCodec

Entry = tuple[float | None, int, str | None]
Entries = list[Entry]


@dataclass(slots=True)
class Logprobs:
    """All there is so far: of the tokens themselves, of the likeliest at each place, and of the ids asked for.

    The input lists begin with a null: the first token follows nothing that was asked for.
    """

    output_token: Entries = field(default_factory=list)
    output_top: list[Entries] = field(default_factory=list)
    output_token_ids: list[Entries] = field(default_factory=list)
    input_token: Entries = field(default_factory=list)
    input_top: list[Entries | None] = field(default_factory=list)
    input_token_ids: list[Entries | None] = field(default_factory=list)

    def share_input(self, other: Logprobs) -> None:
        """Take over what `other`, with the same prompt, has of it."""
        self.input_token, self.input_top = other.input_token, other.input_top
        self.input_token_ids = other.input_token_ids

    def meta(self, take: Callable[[list[Any]], Sequence[Any]], *, token_ids: bool) -> dict[str, Any]:
        """The members of meta_info, each list through `take`; those of the ids asked for only if there are such."""
        out: dict[str, Any] = {
            "input_token_logprobs": take(self.input_token),
            "output_token_logprobs": take(self.output_token),
            "output_token_logprobs_length": len(self.output_token),
            "input_top_logprobs": take(self.input_top),
            "output_top_logprobs": take(self.output_top),
        }
        if token_ids:
            out["input_token_ids_logprobs"] = take(self.input_token_ids)
            out["output_token_ids_logprobs"] = take(self.output_token_ids)
        return out


class LogprobReader:
    """Reads the columns of output messages; keeps the text of each id that it has met."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._texts: dict[int, str] = {}

    def add(self, known: Logprobs, batch: BatchStrOutput, i: int, *, with_text: bool) -> None:
        """Append what row `i` of `batch` brings. A column that nobody asked for is empty."""
        if batch.output_token_logprobs:
            known.output_token += self._entries(
                zip(batch.output_token_logprobs[i], batch.output_ids[i]), with_text
            )
            known.output_top += [self._entries(top, with_text) for top in batch.output_top_logprobs[i]]
        if batch.output_token_ids_logprobs:
            known.output_token_ids += [
                self._entries(ids, with_text) for ids in batch.output_token_ids_logprobs[i]
            ]
        if batch.input_token_logprobs:
            known.input_token += self._entries(batch.input_token_logprobs[i], with_text)
            known.input_top += self._behind_null(batch.input_top_logprobs[i], with_text)
            known.input_token_ids += self._behind_null(batch.input_token_ids_logprobs[i], with_text)

    def _behind_null(self, values: Sequence[TopLogprobs | None], with_text: bool) -> list[Entries | None]:
        return [None if each is None else self._entries(each, with_text) for each in values]

    def _entries(self, pairs: Iterable[tuple[float | None, int]], with_text: bool) -> Entries:
        return [(logprob, token, self._text(token) if with_text else None) for logprob, token in pairs]

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._codec.decode([token], skip_special_tokens=False)
        return text
