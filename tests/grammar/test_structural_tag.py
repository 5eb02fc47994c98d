"""Structural tags: free text, triggers, tags, and the tree of formats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_vocabulary import SPECIAL, encode
from test_llguidance_backend import start, takes

from sgviz.errors import BadRequest

ONE = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
TWO = {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"}
LEGACY = {"structures": [ONE, TWO], "triggers": ["<f="]}
TAG = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
       "end": "</f>"}  # fmt: skip
OTHER = {"type": "tag", "begin": "<g>", "content": {"type": "any_text"}, "end": "</g>"}


def passes(tag: dict[str, Any], output: str) -> bool:
    return takes("structural_tag", json.dumps(tag), output)


def form(**format: Any) -> dict[str, Any]:
    return {"format": format}


@pytest.mark.parametrize(
    ("output", "good"),
    [
        ("", True),
        ("just text, 1 < 2", True),
        ("so <f=a>12</f>", True),
        ('<f=a>12</f> and <f=b>"x"</f> end', True),
        ("<f=a>x</f>", False),
        ('<f=b>"y"</f>', False),
        ("<f=c>1</f>", False),
        ("<f=a>12", False),
        ("<f", True),
    ],
)
def test_text_is_free_until_a_trigger_comes(output: str, good: bool) -> None:
    assert passes(LEGACY, output) is good


def test_the_form_of_xgrammar_says_the_same() -> None:
    tags = [TAG, {**TAG, "begin": "<f=b>"}]
    tree = form(type="triggered_tags", triggers=["<f="], tags=tags)
    for output, good in (("a <f=b>1</f> b", True), ("<f=a>1</f><f=a>2</f>", True), ("<f=c>", False)):
        assert passes(tree, output) is good, output


def test_one_tag_at_least_and_nothing_after_the_first() -> None:
    base = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}
    assert passes(form(**base), "text")
    least = form(**base, at_least_one=True)
    assert not passes(least, "text") and passes(least, "text <f=a>1</f> more")
    only = form(**base, at_least_one=True, stop_after_first=True)
    assert passes(only, "text <f=a>1</f>") and not passes(only, "<f=a>1</f> more")


def test_the_other_formats() -> None:
    word = {"type": "const_string", "value": "ab"}
    digits = {"type": "regex", "pattern": "[0-9]{2}/x"}
    assert passes(form(type="sequence", elements=[word, digits]), "ab12/x")
    assert not passes(form(type="sequence", elements=[word, digits]), "ab1/x")
    assert passes(form(type="or", elements=[word, digits]), "12/x") and passes(form(**word), "ab")
    assert passes(form(**OTHER), "<g>free < text</g>") and not passes(form(**OTHER), "<g>free</g> more")
    assert passes(form(type="json_schema", json_schema=True), "[1]")
    for pattern, output in ((r"a\/b", "a/b"), (r"a\\/b", "a\\/b"), (r"[\/]/\/", "///"), (r"\\\/", "\\/")):
        assert passes(form(type="regex", pattern=pattern), output), pattern
    several = form(type="tags_with_separator", tags=[TAG, OTHER], separator=", ")
    assert (
        passes(several, "<f=a>1</f>, <g></g>")
        and passes(several, "")
        and not passes(several, "<g></g><g></g>")
    )
    assert not passes(form(**{**several["format"], "at_least_one": True}), "")


def test_a_special_token_in_a_begin_or_an_end_is_meant_itself() -> None:
    tag = {
        "structures": [{"begin": "<call>f", "schema": {"type": "integer"}, "end": "<over>"}],
        "triggers": ["<call>"],
    }
    grammar = start("structural_tag", json.dumps(tag))
    ids = [*encode("go "), SPECIAL["<call>"], *encode("f12"), SPECIAL["<over>"], *encode(" on")]
    assert [grammar.accept(token) for token in ids] == [None] * len(ids)
    assert start("structural_tag", json.dumps(tag)).accept(SPECIAL["<call>"]) is None
    assert start("regex", "<call>").accept(SPECIAL["<call>"]) is not None


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, "it needs either format, or structures and triggers"),
        ({"structures": [ONE]}, "structures and triggers"),
        ({"structures": [], "triggers": ["<"]}, "structures must be a list"),
        ({"structures": [ONE], "triggers": []}, "triggers must be a list"),
        ({"structures": [ONE], "triggers": ["["]}, "begins with none of the triggers"),
        ({"structures": [{**ONE, "end": 3}], "triggers": ["<f="]}, "end must be a string"),
        ({"structures": [{**ONE, "schema": 3}], "triggers": ["<f="]}, "a schema must be an object"),
        (form(type="sequenc", elements=[]), "did you mean 'sequence'"),
        (form(type="tag", begin="<", content={"type": "x"}, end=">"), "format.content.type"),
        ({"structures": [{**ONE, "begin": "a<call>"}], "triggers": ["a<call>"]}, "at its beginning only"),
    ],
)
def test_a_fault_is_told_with_its_place(tag: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as found:
        start("structural_tag", json.dumps(tag))
    assert words in found.value.message
