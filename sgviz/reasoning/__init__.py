"""From a reasoning model's text to its thoughts and its answer, for streamed and whole answers alike.

Mirrors SGLang's reasoning_parser. Imports: errors, function_call.
"""

from __future__ import annotations

from sgviz.reasoning.parser import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    Thought,
    format_of,
    marks_of,
)

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "ReasoningParser", "Thought", "format_of", "marks_of"]
