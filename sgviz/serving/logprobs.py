"""Log-probabilities in the two OpenAI shapes, from the engine's `(logprob, token id, text)` triples.

Mirrors SGLang's `process_logprobs` of chat and `to_openai_style_logprobs` of completions.
Imports: nothing of sgviz.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"  # what stands for bytes that are no whole character
LONGEST_RUN = 8  # ids; a character has at most 4 bytes, so a longer run is of bytes that never become one
Triple = tuple[float | None, int, str | None]
FLOOR = -9999.0  # what OpenAI sends for a probability of zero; JSON has no infinity


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else FLOOR


def _entry(triple: Triple) -> dict[str, Any]:
    logprob, _, text = triple
    token = text or ""
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}


def _tops(meta: dict[str, Any], position: int) -> list[Triple]:
    tops = meta.get("output_top_logprobs") or []
    return (tops[position] if position < len(tops) else None) or []


def chat_logprobs(meta: dict[str, Any], start: int = 0) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat answer for the tokens from `start` on; None when there are none."""
    triples: list[Triple] = (meta.get("output_token_logprobs") or [])[start:]
    if not triples:
        return None
    content = [
        {**_entry(triple), "top_logprobs": [_entry(top) for top in _tops(meta, position)]}
        for position, triple in enumerate(triples, start)
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where each token begins in a text, token after token.

    A token begins where the text first changes when it is decoded behind those before, of which as few are kept as
    will do: what a token adds depends on its neighbour, as decoders keep a space or not by what stands there. Tokens
    that share a character all begin where it does.

    Args:
        decode: as the text was decoded, so what that leaves out takes no place.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._run: list[int] = []  # the last token of whole characters, and those behind it
        self._text = ""  # of the run
        self._base = 0  # where the run begins

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The offsets of the next `tokens`."""
        return [self._next(token) for token in tokens]

    def _next(self, token: int) -> int:
        before, self._run = self._text, [*self._run, token]
        self._text = self._decode(self._run)
        offset = self._base + _first_change(before, self._text)
        if not self._text.endswith(UNFINISHED) or len(self._run) > LONGEST_RUN:
            end = self._base + len(self._text)
            self._run = [token]
            self._text = self._decode(self._run)
            self._base = end - len(self._text)
        return offset


def _first_change(before: str, after: str) -> int:
    """Characters that both begin with; one that is not finished yet does not count."""
    if before == after and after.endswith(UNFINISHED):
        return len(after) - 1
    changes = (place for place, (old, new) in enumerate(zip(before, after)) if old != new)
    return next(changes, min(len(before), len(after)))


def completion_logprobs(
    meta: dict[str, Any], offsets: TextOffsets, start: int = 0, with_tops: bool = True
) -> dict[str, Any] | None:
    """`choices[].logprobs` of a text completion for the output tokens from `start` on; None when there are none.

    Args:
        offsets: at the end of what stands before them.
    """
    tops = meta.get("output_top_logprobs") or []
    return _completion(meta.get("output_token_logprobs") or [], tops, offsets, start, with_tops)


def prompt_logprobs(
    meta: dict[str, Any], offsets: TextOffsets, with_tops: bool = True
) -> dict[str, Any] | None:
    """The same for the tokens of the prompt; the first has null in place of numbers."""
    tops = meta.get("input_top_logprobs") or []
    return _completion(meta.get("input_token_logprobs") or [], tops, offsets, 0, with_tops)


def joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two such objects as one."""
    if first is None or second is None:
        return first or second
    return {name: None if first[name] is None else first[name] + second[name] for name in first}


def _completion(
    triples: list[Triple], tops: list[list[Triple] | None], offsets: TextOffsets, start: int, with_tops: bool
) -> dict[str, Any] | None:
    triples = triples[start:]
    if not triples:
        return None
    places = range(start, start + len(triples))
    return {
        "text_offset": offsets.of(token for _, token, _ in triples),
        "token_logprobs": [None if logprob is None else _finite(logprob) for logprob, _, _ in triples],
        "tokens": [text or "" for _, _, text in triples],
        "top_logprobs": [_by_text(_at(tops, place)) for place in places] if with_tops else None,
    }


def _at(tops: list[list[Triple] | None], place: int) -> list[Triple] | None:
    return tops[place] if place < len(tops) else []


def _by_text(tops: list[Triple] | None) -> dict[str, float] | None:
    """Alternatives by text; of two ids with the same text the likelier one stays."""
    if tops is None:
        return None
    out: dict[str, float] = {}
    for logprob, _, text in tops:
        out.setdefault(text or "", _finite(logprob))
    return out
