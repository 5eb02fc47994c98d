"""JSON schemas and literals in llguidance's language. Imports: errors, msgspec, llguidance on first use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from sgviz.errors import BadRequest

# a space, or a line break and an indentation: what models write, and never without end
DEFAULT_WHITESPACE = r" |\r?\n[ \t]{0,32}"


class Whitespace(msgspec.Struct, frozen=True, kw_only=True):
    """What may stand between two tokens of JSON: nothing, or one match of `pattern`."""

    pattern: str = DEFAULT_WHITESPACE
    none: bool = False

    def options(self) -> dict[str, Any]:
        """As llguidance's JsonCompileOptions; keywords it has not are an error whatever the schema says."""
        if self.none:
            return {"lenient": False, "whitespace_flexible": False, "whitespace_pattern": None}
        return {"lenient": False, "whitespace_flexible": True, "whitespace_pattern": self.pattern}


def json_grammar(schema: str, whitespace: Whitespace) -> str:
    """The grammar of JSON texts under `schema`. Raises ValueError for what is no JSON, or lets nothing through."""
    from llguidance import LLMatcher

    if schema.strip() == "false":
        raise BadRequest("the schema is false, under which there is no JSON")
    if schema.strip() == "true":
        schema = "{}"
    return LLMatcher.grammar_from_json_schema(schema, overrides=whitespace.options())  # type: ignore[arg-type]


def inline_json(schema: object, whitespace: Whitespace) -> str:
    """The same as a part of a Lark rule. Raises BadRequest for what is no schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"a schema must be an object or true, got {json.dumps(schema)[:60]}")
    return "%json " + json.dumps({**schema, "x-guidance": whitespace.options()})


def literal(text: str, special: Mapping[str, int]) -> str:
    """`text` as a part of a Lark rule; special tokens in it stand for themselves. Empty for an empty text."""
    parts = [
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece)
        for piece in split_special(text, special)
    ]
    return " ".join(parts)


def split_special(text: str, special: Mapping[str, int]) -> Iterator[str]:
    """The pieces of `text`, where each special token is one."""
    while text:
        found = [(text.find(token), -len(token), token) for token in special if token in text]
        if not found:
            yield text
            return
        at, _, token = min(found)
        if at:
            yield text[:at]
        yield token
        text = text[at + len(token) :]
