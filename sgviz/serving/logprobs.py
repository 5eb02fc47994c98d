"""Log-probabilities in the two OpenAI shapes, from the engine's `(logprob, token id, text)` triples.

Mirrors SGLang's `process_logprobs` of chat and `to_openai_style_logprobs` of completions.
Imports: nothing of sgviz.
"""

from __future__ import annotations

import math
from typing import Any

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


def completion_logprobs(
    meta: dict[str, Any], start: int = 0, offset: int = 0, with_tops: bool = True
) -> dict[str, Any] | None:
    """`choices[].logprobs` of a text completion for the tokens from `start` on; None when there are none.

    Args:
        offset: characters of text before token `start`.
    """
    triples: list[Triple] = (meta.get("output_token_logprobs") or [])[start:]
    if not triples:
        return None
    tokens = [text or "" for _, _, text in triples]
    offsets = [offset + sum(map(len, tokens[:number])) for number in range(len(tokens))]
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(logprob) for logprob, _, _ in triples],
        "tokens": tokens,
        "top_logprobs": [_by_text(_tops(meta, position)) for position in range(start, start + len(triples))]
        if with_tops
        else None,
    }


def _by_text(tops: list[Triple]) -> dict[str, float]:
    """Alternatives by text; of two ids with the same text the likelier one stays."""
    out: dict[str, float] = {}
    for logprob, _, text in tops:
        out.setdefault(text or "", _finite(logprob))
    return out
