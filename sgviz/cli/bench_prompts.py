"""Prompts for `sgviz bench`: ids where the endpoint takes them, else text fitted to its length by the server itself.

Imports: workload, errors, httpx2.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import httpx2

from sgviz.cli.bench_backends import Prompt
from sgviz.workload import Segment, Workload

ROUNDS = 12
WORDS = (
    "river", "stone", "light", "paper", "garden", "window", "music", "silver", "winter", "morning", "water",
    "bread", "letter", "mountain", "orange", "simple", "quiet", "broken", "narrow", "bright", "to", "of", "and",
    "in", "that", "with", "from", "into", "over", "under", "green", "blue", "seven", "many", "few",
)  # fmt: skip


def id_prompts(workload: Workload, vocab_size: int) -> dict[str, Prompt]:
    """Ids of exactly the lengths asked for, by rid."""
    return {each.rid: workload.ids_of(each, vocab_size) for each in workload.requests}


async def text_prompts(workload: Workload, http: httpx2.AsyncClient) -> tuple[dict[str, Prompt], bool]:
    """Texts as long as the server's tokenizer counts, by rid; and whether it was there to be asked.

    A segment is fitted alone, so shared prefixes are equal to the letter; joining may shift a count by one.
    """
    segments = list({segment.key: segment for each in workload.requests for segment in each.prompt}.values())
    texts, counted = await _fitted(segments, workload.seed, http)
    return {
        each.rid: " ".join(texts[segment.key] for segment in each.prompt) for each in workload.requests
    }, counted


async def _fitted(
    segments: Sequence[Segment], seed: int, http: httpx2.AsyncClient
) -> tuple[Mapping[str, str], bool]:
    """Cut long texts until their tokens are as many as wanted; the nearest try where none is exact."""
    long = {each.key: _words(f"{seed}/{each.key}", each.tokens) for each in segments}
    chars = {each.key: max(1, each.tokens * 5) for each in segments}
    best: dict[str, tuple[int, str]] = {}
    open_ = list(segments)
    for _ in range(ROUNDS):
        tries = [long[each.key][: chars[each.key]] for each in open_]
        counts = await count_tokens(tries, http)
        if counts is None:
            return {each.key: " ".join(long[each.key].split()[: each.tokens]) for each in segments}, False
        for each, text, count in zip(open_, tries, counts):
            off = abs(count - each.tokens)
            if each.key not in best or off < best[each.key][0]:
                best[each.key] = (off, text)
            step = round((each.tokens - count) * chars[each.key] / max(1, count))
            chars[each.key] = max(
                1, chars[each.key] + (step or (each.tokens > count) - (each.tokens < count))
            )
        open_ = [each for each in open_ if best[each.key][0]]
        if not open_:
            break
    return {key: text for key, (_, text) in best.items()}, True


def _words(key: str, tokens: int) -> str:
    """More text than any tokenizer needs for so many tokens."""
    return " ".join(random.Random(key).choices(WORDS, k=2 * tokens + 4))


async def count_tokens(texts: Sequence[str], http: httpx2.AsyncClient) -> list[int] | None:
    """How many tokens the server's tokenizer makes of each text; None if it has no /tokenize."""
    if not texts:
        return []
    response = await http.post(
        "/tokenize", json={"prompt": list(texts), "add_special_tokens": False}, timeout=120.0
    )
    if response.status_code != 200:
        return None
    count = response.json().get("count")
    return [int(each) for each in count] if isinstance(count, list) and len(count) == len(texts) else None
