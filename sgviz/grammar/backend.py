"""The borders of this room: a backend compiles a grammar's text, what it compiled begins any number of times.

Mirrors SGLang's BaseGrammarBackend. Imports: batch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sgviz.batch.grammar import Grammar


class Key(NamedTuple):
    """What is compiled: the field of SamplingParams, and its text.

    `thoughts`: the answer begins inside of thoughts, behind which the grammar holds; None: it may begin with thoughts.
    """

    kind: str
    text: str
    thoughts: bool | None = False


class CompiledGrammar(Protocol):
    """A grammar of which every request gets its own state."""

    def start(self) -> Grammar:
        """A state at the beginning; quick, for the scheduler's thread."""
        ...


class GrammarBackend(Protocol):
    """Compiles. Called by several threads at once, never by the scheduler's."""

    def compile(self, key: Key) -> CompiledGrammar:
        """May take long.

        Raises:
            BadRequest: the text cannot be compiled, and why. Whatever else it raises is a fault of its own.
        """
        ...
