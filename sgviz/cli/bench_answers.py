"""One answer of a benchmark as it comes in: its text, its times, and the tokens of each chunk.

Mirrors RequestFuncOutput of SGLang's bench_serving. Imports: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Measured:
    """One request. Times in seconds; `start` on the client's monotonic clock, the others since then.

    Attributes:
        itl: a gap for each token after the first. stamps, counts: when chunks with text came, and their tokens.
        error: what went wrong; empty for a success.
    """

    rid: str
    prompt_tokens: int
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    itl: list[float] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""
    streamed: bool = True

    @property
    def ok(self) -> bool:
        return not self.error


class Tokens:
    """The text of one answer as it comes, and at the end the tokens of each chunk."""

    def __init__(self) -> None:
        self.text = ""
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self._stamps: list[float] = []
        self._chars: list[int] = []
        self._totals: list[int | None] = []

    def set_text(self, text: str, now: float, total: int) -> None:
        """All text so far, of `total` tokens."""
        if len(text) > len(self.text):
            self._note(len(text) - len(self.text), now, total)
        self.text = text

    def add_text(self, piece: str, now: float, total: int | None) -> None:
        """A new piece; `total` tokens so far, if the chunk says so."""
        self._note(len(piece), now, total)
        self.text += piece

    def _note(self, chars: int, now: float, total: int | None) -> None:
        self._stamps.append(now)
        self._chars.append(chars)
        self._totals.append(total)

    def usage(self, prompt: int, output: int, cached: int) -> None:
        """The newest counts stand for all before them."""
        self.prompt_tokens, self.output_tokens, self.cached_tokens = prompt, output, cached

    def into(self, out: Measured) -> None:
        """Fill in the times, with the gap before a chunk shared by its tokens."""
        out.text, out.output_tokens, out.cached_tokens = self.text, self.output_tokens, self.cached_tokens
        out.prompt_tokens = self.prompt_tokens or out.prompt_tokens
        out.stamps, out.counts = self._stamps, self._counts()
        out.ttft = self._stamps[0] if self._stamps else 0.0
        last = out.ttft
        for stamp, count in zip(out.stamps[1:], out.counts[1:]):
            out.itl += [(stamp - last) / count] * count if count else []
            last = stamp if count else last

    def _counts(self) -> list[int]:
        """Tokens of each chunk: as told, else shared out by the chunks' characters."""
        if not self._stamps:
            return []
        if any(total is None for total in self._totals):
            return share_out(self.output_tokens, self._chars)
        totals = [total or 0 for total in self._totals]
        return [totals[0], *(max(0, b - a) for a, b in pairwise(totals))]


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts that follow `weights`; the running sum is always the nearest to its share."""
    whole, before, seen, out = sum(weights), 0, 0, []
    for weight in weights:
        seen += weight
        now = round(total * seen / whole) if whole else 0
        out.append(now - before)
        before = now
    return out
