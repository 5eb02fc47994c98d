"""LLGuidanceBackend: grammars by llguidance, a Rust library that computes a mask from the grammar at each token.

Nothing is computed for the whole vocabulary in advance, so compiling is quick, and the library bounds the work of a
compilation and of a step. It gives up the interpreter lock while it compiles and fills, but not while it takes in the
vocabulary, which happens once. Mirrors SGLang's GuidanceBackend.
Imports: batch, grammar, errors; llguidance on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sgviz.batch.grammar import Failure
from sgviz.errors import BadRequest
from sgviz.grammar.backend import Key
from sgviz.grammar.structural_tag import structural_tag_grammar
from sgviz.grammar.text import Whitespace, json_grammar
from sgviz.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# one lexer state of long JSON strings is looked up instead of walked through; every further one costs start-up time
SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}']
MOST_TOKENS = 1 << 32  # the library counts in 32 bits
MOST_OF_A_MESSAGE = 500  # characters
# what the library says by the name of a state of its own
MEANINGS = MappingProxyType(
    {
        "NoExtensionBias": "no text fits it: it lets nothing through, or refers to nothing but itself",
        "NoExtension": "no text fits it",
        "LexerTooComplex": "its texts are too complex to be told apart",
        "ParserTooComplex": "it can be read in too many ways",
    }
)


@dataclass(slots=True)
class _Library:
    """What of llguidance is made once."""

    tokenizer: LLTokenizer
    limits: LLParserLimits
    vocabulary: Vocabulary


@dataclass(slots=True)
class LLGuidanceBackend:
    """Compiles for one model.

    Args:
        vocabulary: gives the vocabulary when the first grammar comes.
        eos_token_ids: what may come where the grammar may end.
        whitespace: what may stand between the tokens of JSON.
    """

    vocabulary: Callable[[], Vocabulary]
    eos_token_ids: tuple[int, ...]
    whitespace: Whitespace = field(default_factory=Whitespace)
    _made: _Library | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, key: Key) -> Compiled:
        """Compile and compute the first mask, so that whatever is wrong shows here.

        Raises:
            BadRequest: the text is no such grammar, needs more than the library has, or is too large.
        """
        from llguidance import LLMatcher

        library = self._library()
        kind, text, *_ = key
        grammar = self._grammar(kind, text, library.vocabulary)
        matcher = LLMatcher(library.tokenizer, grammar, log_level=0, limits=library.limits)
        error = matcher.get_error()
        if not error:
            matcher.compute_bitmask()
            error = matcher.get_error()
        if error:
            raise BadRequest(f"the {kind} cannot be compiled: {_first_words(error)}", param=kind)
        return Compiled(matcher)

    def _grammar(self, kind: str, text: str, vocabulary: Vocabulary) -> str:
        """The library's own text for it."""
        from llguidance import LLMatcher, grammar_from

        try:
            if kind == "json_schema":
                return json_grammar(text, self.whitespace)
            if kind == "structural_tag":
                return structural_tag_grammar(text, vocabulary.special, self.whitespace)
            if kind == "regex":
                return LLMatcher.grammar_from_regex(text)
            return grammar_from("ebnf", text)
        except (ValueError, RecursionError) as error:
            message = error.message if isinstance(error, BadRequest) else str(error)
            raise BadRequest(f"the {kind} cannot be compiled: {_first_words(message)}", param=kind) from None

    def _library(self) -> _Library:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> _Library:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        if not self.eos_token_ids:
            raise BadRequest("this model has no end-of-sequence id, without which no grammar can end")
        vocabulary = self.vocabulary()
        wrapper = TokenizerWrapper(_Words(vocabulary, self.eos_token_ids[0]))
        tokenizer = LLTokenizer(wrapper, eos_token=list(self.eos_token_ids), slices=SLICES)
        return _Library(tokenizer, LLParserLimits(verbose_errors=False), vocabulary)


class Compiled:
    """A matcher that never moves; each request gets a copy. The copies share what their lexers learn."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """The state of one request; satisfies `batch.grammar.Grammar`."""

    __slots__ = ("_ended", "_failure", "_matcher", "accepted")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._ended = False
        self._failure: Failure | None = None
        self.accepted = 0

    @property
    def ended(self) -> bool:
        return self._ended

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """A state that has become too complex leaves an end token only, and `accept` tells."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token: int) -> Failure | None:
        matcher = self._matcher
        if self._failure is None and matcher.is_error():  # since the mask was filled
            self._failure = Failure(_first_words(matcher.get_error()), True)
        if self._failure is not None:
            return self._failure
        possible = 0 <= token < MOST_TOKENS
        fits = possible and matcher.validate_tokens([token]) == 1
        if not possible or not matcher.consume_token(token):
            message = _first_words(matcher.get_error()) or f"token {token} may not come here"
            self._failure = Failure(message, too_complex=fits)
            return self._failure
        self.accepted += 1
        self._ended = matcher.is_stopped()
        return None


class _Words:
    """The vocabulary as llguidance's TokenizerWrapper wants to see it."""

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special.values())
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _first_words(error: str) -> str:
    """The message without the library's account of its state, on one line."""
    words = " ".join(error.split("<state>")[0].replace("<non-verbose/>", "").split())
    words = MEANINGS.get(words, words)
    return words if len(words) <= MOST_OF_A_MESSAGE else words[: MOST_OF_A_MESSAGE - 3] + "..."
