"""The backend over a vocabulary of 97 tokens: what each kind lets through, where it ends, and what it refuses."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from small_vocabulary import EOS, SIZE, SPECIAL, VOCABULARY, backend, encode

from sgviz.errors import BadRequest
from sgviz.grammar.llguidance_backend import LLGuidanceBackend, Matcher
from sgviz.grammar.text import Whitespace

OBJECT = (
    '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
)
EBNF = 'root ::= "yes" | "no" num\nnum ::= [0-9]+'


def start(kind: str, text: str, whitespace: Whitespace | None = None) -> Matcher:
    made = backend() if whitespace is None else LLGuidanceBackend(lambda: VOCABULARY, (EOS,), whitespace)
    return made.compile((kind, text)).start()


def allowed(grammar: Matcher) -> list[int]:
    row = np.zeros(-(-SIZE // 32), dtype=np.int32)
    grammar.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:SIZE]).tolist()


def takes(kind: str, text: str, output: str, whitespace: Whitespace | None = None) -> bool:
    """Every token of `output` was in the mask before it, and the output may end there."""
    grammar = start(kind, text, whitespace)
    for token in encode(output):
        if token not in allowed(grammar):
            return False
        assert grammar.accept(token) is None
    return EOS in allowed(grammar)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{3}-[ab]+", ["123-a", "000-abab"], ["12-a", "123-", "123-c", "1234-a"]),
        ("regex", "", [""], ["a"]),
        (
            "json_schema",
            OBJECT,
            ['{"a":1}', '{"a": 12}', '{\n  "a": 3\n}'],
            ['{"b":1}', '{"a":1.5}', "{}", "1"],
        ),
        ("json_schema", '{"type":"object"}', ["{}", '{"x": [1, {"y": null}]}'], ["[]", '{"x"}', "{"]),
        ("json_schema", "true", ["1", "null", '"a"'], ["nul", "]"]),
        ("ebnf", EBNF, ["yes", "no12"], ["no", "maybe"]),
        ("ebnf", 'start: "yes" | "no" /[0-9]+/', ["yes", "no0"], ["no", "nox"]),
    ],
)
def test_what_matches_is_let_through_and_nothing_else(
    kind: str, text: str, good: list[str], bad: list[str]
) -> None:
    assert {output: takes(kind, text, output) for output in good} == dict.fromkeys(good, True)
    assert {output: takes(kind, text, output) for output in bad} == dict.fromkeys(bad, False)


def test_the_end_is_where_nothing_can_follow() -> None:
    grammar = start("regex", "ab?")
    assert grammar.accept(encode("a")[0]) is None
    assert not grammar.ended and EOS in allowed(grammar)
    assert grammar.accept(encode("b")[0]) is None
    assert grammar.ended and allowed(grammar) == [EOS] and grammar.accepted == 2


def test_an_end_token_ends_it_where_more_could_follow() -> None:
    grammar = start("regex", "a+")
    assert [grammar.accept(token) for token in (*encode("a"), EOS)] == [None, None]
    assert grammar.ended


def test_special_tokens_and_rows_without_a_token_never_come_in_a_text() -> None:
    free = allowed(start("regex", r"(.|\n)*"))
    assert [i for i in SPECIAL.values() if i in free] == [EOS]
    assert max(free) < len(VOCABULARY.tokens) and not [i for i in free if not VOCABULARY.tokens[i]]


def test_a_token_that_may_not_come_is_told_and_the_state_stays_there() -> None:
    grammar = start("regex", "ab")
    failure = grammar.accept(encode("x")[0])
    assert (
        failure is not None and "doesn't satisfy the grammar" in failure.message and not failure.too_complex
    )
    assert grammar.accept(encode("a")[0]) == failure and grammar.accepted == 0
    for token in (-1, SIZE + 3, 1 << 40):
        assert start("regex", "ab").accept(token) is not None


def test_states_of_one_grammar_go_their_own_ways() -> None:
    compiled = backend().compile(("regex", "a|bc"))
    one, other = compiled.start(), compiled.start()
    assert one.accept(encode("b")[0]) is None
    assert allowed(one) == encode("c") and set(allowed(other)) == {*encode("a"), *encode("b")}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(((", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", r"(a)\1", "backreferences"),
        ("ebnf", "root ::= other", "other"),
        ("ebnf", "hello", "cannot be compiled"),
        ("ebnf", "root ::= root", "cannot be compiled"),
        ("json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ("json_schema", '{"not":{}}', "not"),
        ("json_schema", '{"$ref":"#"}', "cannot be compiled"),
        ("json_schema", '{"$ref":"http://example.com/a.json"}', "example.com"),
        ("json_schema", '{"type":"integer","minimum":5,"maximum":3}', "minimum"),
        ("json_schema", '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}', "uniqueItems"),
        ("json_schema", "false", "false"),
        ("json_schema", '{"type":"string","pattern":"^(?=a)"}', "look"),
    ],
)
def test_what_cannot_be_compiled_says_why(kind: str, text: str, words: str) -> None:
    with pytest.raises(BadRequest, match="cannot be compiled") as found:
        start(kind, text)
    assert words in found.value.message and found.value.param == kind
    assert "\n" not in found.value.message and len(found.value.message) < 600


def deep(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep(400),
        {"type": "integer", "multipleOf": 999999937, "minimum": 0, "maximum": 10**18},
    ],
    ids=["deep", "dense"],
)
def test_what_is_beyond_the_library_s_limits_is_refused_before_it_runs(schema: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="cannot be compiled"):
        start("json_schema", json.dumps(schema))


def test_what_becomes_too_complex_on_the_way_says_so_and_leaves_the_end_only() -> None:
    text = {"type": "string", "maxLength": 99999}
    wide = {"type": "object", "properties": {f"p{i}": text for i in range(2500)}}
    grammar = start("json_schema", json.dumps(wide))
    failure = next(filter(None, map(grammar.accept, encode('{"p1":"a"}'))))
    assert failure.too_complex and "items" in failure.message
    assert allowed(grammar) == [EOS]


@pytest.mark.parametrize(
    "pattern", ["((a{1,100}){1,100}){1,100}", "[a-z]{0,100000}", "(.*a){20}", "(a|b)*a(a|b){25}"]
)
def test_a_regex_that_explodes_elsewhere_does_not_here(pattern: str) -> None:
    grammar = start("regex", pattern)
    for token in encode("a") * 40:
        assert token in allowed(grammar)
        assert grammar.accept(token) is None


def test_white_space_in_json_has_bounds() -> None:
    assert takes("json_schema", OBJECT, '{ "a" : 1 }')
    assert takes("json_schema", OBJECT, "{\n" + " " * 32 + '"a":1}')
    assert not takes("json_schema", OBJECT, '{  "a":1}')
    assert not takes("json_schema", OBJECT, "{\n" + " " * 33 + '"a":1}')
    assert not takes("json_schema", OBJECT, '{\n\n"a":1}')
    compact, dashes = Whitespace(none=True), Whitespace(pattern="-{1,2}")
    assert takes("json_schema", OBJECT, '{"a":1}', compact) and not takes(
        "json_schema", OBJECT, '{"a": 1}', compact
    )
    assert takes("json_schema", OBJECT, '{--"a":1}', dashes) and not takes(
        "json_schema", OBJECT, '{ "a":1}', dashes
    )
    own = json.dumps({**json.loads(OBJECT), "x-guidance": {"whitespace_pattern": "-+"}})
    assert not takes("json_schema", own, '{--"a":1}')


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(BadRequest, match="no end-of-sequence id"):
        LLGuidanceBackend(lambda: VOCABULARY, ()).compile(("regex", "a"))


def test_the_vocabulary_is_taken_once_and_on_the_first_grammar() -> None:
    asked: list[str] = []

    def vocabulary():  # type: ignore[no-untyped-def]
        asked.append(threading.current_thread().name)
        return VOCABULARY

    made = LLGuidanceBackend(vocabulary, (EOS,))
    assert asked == []
    threads = [threading.Thread(target=made.compile, args=(("regex", f"a{{{i}}}"),)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
