"""Grammars for models that think first: thoughts are free, and the grammar holds from where they end.

Mirrors SGLang's ReasonerGrammarBackend and ReasonerGrammarObject. Here an answer that may begin with thoughts, but does
not, is under its grammar from its first token; and thoughts are a grammar too, so that they cannot end the answer, hold
a marker that would begin a call, or end inside of a token that goes on with something else.
Imports: batch, grammar, errors.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sgviz.batch.grammar import Failure, Grammar
from sgviz.errors import BadRequest
from sgviz.grammar.backend import CompiledGrammar, GrammarBackend, Key

SPACES = r"[ \t\r\n]{1,8}"  # of one token between thoughts and answer
MOST_SPACES = 4  # such tokens


class ThoughtMarks(Protocol):
    """How a family of models marks its thoughts; `sgviz.reasoning` knows them by name."""

    @property
    def start(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def interrupts(self) -> Sequence[str]:
        """Texts that end thoughts as well, and so may not come in them here."""
        ...


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The grammars of what comes before an answer: what begins thoughts, they with their end, and white space."""

    opening: CompiledGrammar
    inside: CompiledGrammar
    spaces: CompiledGrammar


@dataclass(slots=True)
class ReasonerBackend:
    """Compiles what `backend` does, and with thoughts before it where the key says so.

    Args:
        marks: of the server's models; None: such a key is refused.
    """

    backend: GrammarBackend
    marks: ThoughtMarks | None
    _thoughts: Thoughts | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, key: Key) -> CompiledGrammar:
        """Raises BadRequest as `backend` does, and for thoughts where no marks are known."""
        answer = self.backend.compile(key)
        thoughts = key.thoughts
        return (
            answer if thoughts is False else AfterThoughts(answer, self._compiled(), begun=thoughts is True)
        )

    def _compiled(self) -> Thoughts:
        if self.marks is None:
            raise BadRequest(
                "require_reasoning needs a server that was started with --reasoning-parser",
                param="require_reasoning",
            )
        with self._lock:
            if self._thoughts is None:
                self._thoughts = self._compile(self.marks)
            return self._thoughts

    def _compile(self, marks: ThoughtMarks) -> Thoughts:
        space = {"type": "regex", "pattern": f"({SPACES})?"}
        opening = {"type": "sequence", "elements": [space, {"type": "const_string", "value": marks.start}]}
        free = {"type": "any_text", "excludes": list(marks.interrupts) or None}
        to_end = {"type": "tag", "begin": "", "content": free, "end": marks.end}
        # some models open their thoughts where the prompt could have
        begins = {"type": "or", "elements": [{"type": "const_string", "value": ""}, opening]}
        inside = {"type": "sequence", "elements": [begins, to_end]}
        return Thoughts(
            self.backend.compile(Key("structural_tag", json.dumps({"format": opening}))),
            self.backend.compile(Key("structural_tag", json.dumps({"format": inside}))),
            self.backend.compile(Key("regex", SPACES)),
        )


@dataclass(frozen=True, slots=True)
class AfterThoughts:
    """An answer's grammar that holds behind thoughts. `begun`: the prompt has opened them; else they may come."""

    answer: CompiledGrammar
    thoughts: Thoughts
    begun: bool

    def start(self) -> ReasonerGrammar:
        return ReasonerGrammar(self.answer, self.thoughts, self.begun)


class Stage(Enum):
    """Where one request is: thoughts may begin, it thinks, they have just ended, or it answers."""

    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()
    ANSWER = auto()


class ReasonerGrammar:
    """The state of one request; satisfies `batch.grammar.Grammar`.

    Before and behind thoughts two grammars stand side by side: that of the answer, and that of what may come before it.
    """

    __slots__ = ("_answer", "_prelude", "_spaces", "_thoughts", "_whole", "accepted", "stage")

    def __init__(self, answer: CompiledGrammar, thoughts: Thoughts, begun: bool) -> None:
        self._whole = answer
        self._thoughts = thoughts
        self._answer: Grammar | None = None if begun else answer.start()
        self._prelude: Grammar | None = (thoughts.inside if begun else thoughts.opening).start()
        self.stage = Stage.INSIDE if begun else Stage.BEFORE
        self._spaces = 0
        self.accepted = 0

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ANSWER and self._answer is not None and self._answer.ended

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """What the answer lets come, or what may come before it."""
        if self._answer is not None:
            self._answer.fill(row)
        if self._prelude is not None:
            beside = np.zeros_like(row)
            self._prelude.fill(beside)
            row |= beside

    def accept(self, token: int) -> Failure | None:
        failure = self._steps[self.stage](self, token)
        self.accepted += failure is None
        return failure

    def _before(self, token: int) -> Failure | None:
        """Whoever takes the token goes on; once thoughts have begun, the answer has not."""
        assert self._prelude is not None
        refused = self._prelude.accept(token)
        if refused is not None:
            return self._only_answer(token, refused)
        if self._prelude.ended:
            self._answer, self._prelude, self.stage = None, self._thoughts.inside.start(), Stage.INSIDE
        elif self._answer is not None and self._answer.accept(token) is not None:
            self._answer = None
        return None

    def _inside(self, token: int) -> Failure | None:
        assert self._prelude is not None
        failure = self._prelude.accept(token)
        if failure is None and self._prelude.ended:
            self._answer, self._prelude = self._whole.start(), self._thoughts.spaces.start()
            self.stage = Stage.BEHIND
        return failure

    def _behind(self, token: int) -> Failure | None:
        """A token of the answer, or else white space, of which there is a limit to the number of tokens."""
        assert self._answer is not None and self._prelude is not None
        failure = self._answer.accept(token)
        if failure is None:
            self._prelude, self.stage = None, Stage.ANSWER
            return None
        if self._prelude.accept(token) is not None:
            return failure
        self._spaces += 1
        self._answer, self._prelude = self._whole.start(), self._thoughts.spaces.start()
        if self._spaces == MOST_SPACES:
            self._prelude, self.stage = None, Stage.ANSWER
        return None

    def _only_answer(self, token: int, refused: Failure | None = None) -> Failure | None:
        """The answer goes on, or begins; `refused`: why something before it does not."""
        if self._answer is None:
            return refused
        failure = self._answer.accept(token)
        if failure is None:
            self._prelude, self.stage = None, Stage.ANSWER
        return failure

    _steps: ClassVar[Mapping[Stage, Callable[[ReasonerGrammar, int], Failure | None]]] = MappingProxyType(
        {
            Stage.BEFORE: _before,
            Stage.INSIDE: _inside,
            Stage.BEHIND: _behind,
            Stage.ANSWER: _only_answer,
        }
    )
