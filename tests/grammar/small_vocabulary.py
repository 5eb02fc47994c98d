"""A vocabulary of 97 tokens that JSON and short regexes can be written with, and what decodes it."""

from __future__ import annotations

from sgviz.events import VirtualClock
from sgviz.grammar import GrammarCompiler
from sgviz.grammar.llguidance_backend import LLGuidanceBackend
from sgviz.grammar.vocabulary import Vocabulary

SIZE = 97
EOS = 2
SPECIAL = {"<s>": 0, "<call>": 1, "<end>": EOS, "<over>": 3}
CHARS = '{}[]":,-+.0123456789abcdefghijklmnopqrstuvwxyz \n\\<>=/_E'
PIECES = ["true", "false", "null", '":', '{"', '"}', ", ", "ab", "xy", "12", "00", "the", " a", "</"]
TEXTS = [*SPECIAL, *CHARS, *PIECES]
TOKENS = [text.encode() for text in TEXTS] + [b""] * (SIZE - len(TEXTS))


def encode(text: str) -> list[int]:
    """Longest piece first."""
    ids: list[int] = []
    order = sorted(range(len(SPECIAL), len(TEXTS)), key=lambda i: -len(TEXTS[i]))
    while text:
        token = next(i for i in order if text.startswith(TEXTS[i]))
        ids.append(token)
        text = text[len(TEXTS[token]) :]
    return ids


def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
    skip = len(SPECIAL) if skip_special_tokens else 0
    return "".join(TEXTS[i] for i in ids if skip <= i < len(TEXTS))


VOCABULARY = Vocabulary(tokens=TOKENS, special=SPECIAL, encode=encode)


def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(lambda: VOCABULARY, (EOS,))


def compiler(*, inline: bool = True) -> GrammarCompiler:
    return GrammarCompiler(backend(), VirtualClock(1), inline=inline)
