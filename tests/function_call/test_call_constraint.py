"""The schema of a demanded call: what it takes and what it does not, and that a grammar can be made of it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest

from sgviz.function_call import ToolSpec, calls_schema

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/P"}, "next": {"$ref": "#"}},
    "required": ["at"],
    "$defs": {"P": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
}
NAMED = {  # the same name for something else
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/P"}},
    "required": ["who"],
    "$defs": {"P": {"type": "string"}},
}
TOOLS = [ToolSpec("move", POINT), ToolSpec("greet", NAMED), ToolSpec("ping")]


def call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ([call("move", at=[1, 2])], True),
        ([call("move", at=[1, 2], next={"at": [3, 4]})], True),
        ([call("greet", who="ann"), call("ping", any="thing")], True),
        ([], False),
        ([call("greet", who=[1, 2])], False),
        ([call("move", at="ann")], False),
        ([call("move", at=[1, 2], next={})], False),
        ([call("other")], False),
        ([{"name": "ping"}], False),
        (call("ping"), False),
    ],
)
def test_what_fits(answer: Any, fits: bool) -> None:
    schema = calls_schema(TOOLS, several=True)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(answer) is fits


def test_one_call_only() -> None:
    validator = jsonschema.Draft202012Validator(calls_schema(TOOLS, several=False))
    assert validator.is_valid([call("ping")]) and not validator.is_valid([call("ping"), call("ping")])


@pytest.mark.parametrize("several", [True, False])
def test_a_grammar_can_be_made_of_it(several: bool) -> None:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(calls_schema(TOOLS, several=several)))
    tokenizer = llguidance.LLTokenizer("byte")
    assert llguidance.LLMatcher.validate_grammar(grammar, tokenizer) == ""
    for answer, fits in [([call("move", at=[1, 2])], True), ([call("greet", who=3)], False)]:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        ids = tokenizer.tokenize_str(json.dumps(answer))
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits
