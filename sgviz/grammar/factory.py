"""make_compiler: from settings to the compiler they ask for. Imports: config, model.tokenizer, grammar."""

from __future__ import annotations

from sgviz.config import GrammarConfig
from sgviz.events import Clock
from sgviz.grammar.compiler import GrammarCompiler
from sgviz.grammar.llguidance_backend import LLGuidanceBackend
from sgviz.grammar.reasoner import ReasonerBackend, ThoughtMarks
from sgviz.grammar.text import DEFAULT_WHITESPACE, Whitespace
from sgviz.grammar.vocabulary import Vocabulary
from sgviz.model.tokenizer import Tokenizer


def make_compiler(
    config: GrammarConfig,
    tokenizer: Tokenizer,
    clock: Clock,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    marks: ThoughtMarks | None = None,
    inline: bool = False,
) -> GrammarCompiler | None:
    """The compiler for a model; None if the settings want none. Nothing is loaded before the first grammar.

    Args:
        vocab_size: the model's. marks: of its thoughts, if the server knows them. inline: see GrammarCompiler.
    """
    if config.grammar_backend == "none":
        return None
    pattern = config.constrained_json_whitespace_pattern
    whitespace = Whitespace(
        pattern=DEFAULT_WHITESPACE if pattern is None else pattern,
        none=config.constrained_json_disable_any_whitespace,
    )
    backend = LLGuidanceBackend(lambda: Vocabulary.of(tokenizer, vocab_size), eos_token_ids, whitespace)
    return GrammarCompiler(ReasonerBackend(backend, marks), clock, inline=inline)
