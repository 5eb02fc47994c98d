"""Thoughts before a grammar: free to their end, and from there the grammar, whatever the tokens are cut like."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from sgviz.batch.grammar import Grammar
from sgviz.errors import BadRequest
from sgviz.events import VirtualClock
from sgviz.grammar import GrammarCompiler, Key
from sgviz.grammar.llguidance_backend import LLGuidanceBackend
from sgviz.grammar.reasoner import ReasonerBackend, ReasonerGrammar, Stage
from sgviz.grammar.vocabulary import Vocabulary
from sgviz.reasoning import ReasoningFormat, ReasoningParser, format_of

REGEX = "[0-9]{2,4}"
EOS = 0
# letters, and pieces that cross the borders of markers
PIECES = [
    "<eos>",
    *'<>/abcdefghijklmnopqrstuvwxyz _.0123456789\n{}"',
    "</",
    "nk>",
    ">\n\n",
    ">1",
    "think",
    " 7",
    "<tool",
]
CROSSING = (">\n\n", ">1")
MARKERS = ["<think>", "</think>", "<tool_call>"]


def backend(form: ReasoningFormat | None, *, special: bool) -> ReasonerBackend:
    texts = PIECES + MARKERS if special else PIECES
    ids = {"<eos>": EOS} | ({marker: texts.index(marker) for marker in MARKERS} if special else {})
    vocabulary = Vocabulary(
        tokens=[text.encode() for text in texts], special=ids, encode=lambda text: ids_of(text, special=False)
    )
    return ReasonerBackend(LLGuidanceBackend(lambda: vocabulary, (EOS,)), form)


def letters(text: str) -> list[int]:
    return [PIECES.index(char) for char in text if char in PIECES]


def ids_of(text: str, special: bool) -> list[int]:
    """In the longest pieces that end where a marker does."""
    texts = [*(MARKERS if special else ()), *(piece for piece in PIECES if piece not in CROSSING)]
    out = []
    while text:
        piece = max((each for each in texts if text.startswith(each)), key=len)
        out.append((PIECES + MARKERS).index(piece))
        text = text[len(piece) :]
    return out


def allowed(grammar: Grammar) -> list[int]:
    size = len(PIECES) + len(MARKERS)
    row = np.zeros(-(-size // 32), dtype=np.int32)
    grammar.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size]).tolist()


def begin(name: str, thoughts: bool | None, *, special: bool, regex: str = REGEX) -> Grammar:
    return backend(format_of(name), special=special).compile(Key("regex", regex, thoughts)).start()


def takes(grammar: Grammar, ids: list[int]) -> bool:
    """Every token was in the mask before it and was taken, and then an end could come."""
    for token in ids:
        if token not in allowed(grammar):
            return False
        assert grammar.accept(token) is None
    assert grammar.accepted == len(ids)
    return EOS in allowed(grammar)


@pytest.fixture(params=[True, False], ids=["special", "letters"])
def special(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield bool(request.param)


@pytest.mark.parametrize(
    ("thoughts", "text", "good"),
    [
        (True, "any {thing} 1 < 2\n</think>\n\n12", True),
        (True, "</think>123", True),
        (True, "<think>twice</think>12", True),
        (True, "12", False),  # still a thought
        (True, "a</think>x", False),
        (True, "a</think>", False),
        (True, "a</think>\n", False),  # white space is no answer
        (True, "a<tool_call>12", False),  # it would end the thoughts as well
        (None, "12", True),
        (None, "<think>a b</think>\n\n1234", True),
        (None, "\n<think>a</think>12", True),
        (None, "<think>12", False),
        (None, "thinking", False),
        (None, "<12", False),
        (False, "<think>a</think>12", False),
        (False, "12", True),
    ],
)
def test_the_grammar_holds_from_the_end_of_thoughts(
    special: bool, thoughts: bool | None, text: str, good: bool
) -> None:
    grammar = begin("qwen3", thoughts, special=special)
    assert takes(grammar, ids_of(text, special)) is good


def test_thoughts_cannot_end_the_answer_nor_run_over_into_it() -> None:
    grammar = begin("deepseek-r1", True, special=False)
    assert EOS not in allowed(grammar) and not grammar.ended
    for token in ids_of("so</thi", special=False):
        assert grammar.accept(token) is None
    may = {(PIECES + MARKERS)[token] for token in allowed(grammar)}
    assert "nk>" in may and "n" in may and EOS not in allowed(grammar)
    for token in letters("nk"):
        assert grammar.accept(token) is None
    may = {(PIECES + MARKERS)[token] for token in allowed(grammar)}
    assert ">" in may and not {*CROSSING} & may  # the 1 would be neither thought nor seen by the grammar


def test_an_answer_that_may_hold_a_marker_still_begins_with_thoughts(special: bool) -> None:
    """The parser takes the marker for the beginning of thoughts, so the grammar must."""
    grammar = begin("qwen3", None, special=special, regex="(.|\\n)*x")
    assert takes(grammar, ids_of("<think>a</think>bx", special))
    assert isinstance(grammar, ReasonerGrammar) and grammar.stage is Stage.ANSWER
    grammar = begin("qwen3", None, special=special, regex="<(.|\\n)*x")
    assert takes(grammar, letters("<thinx"))


def test_the_end_comes_as_without_thoughts(special: bool) -> None:
    grammar = begin("qwen3", True, special=special)
    for token in [*ids_of("a</think>\n", special), *letters("123")]:
        assert grammar.accept(token) is None and not grammar.ended
    assert grammar.accept(letters("4")[0]) is None and grammar.ended
    failed = begin("qwen3", True, special=special)
    for token in ids_of("a</think>", special):
        failed.accept(token)
    failure = failed.accept(letters("x")[0])
    assert failure is not None and not failure.too_complex


def test_white_space_between_is_bounded(special: bool) -> None:
    grammar = begin("qwen3", True, special=special)
    for token in ids_of("a</think>", special):
        grammar.accept(token)
    taken = 0
    while (space := letters("\n")[0]) in allowed(grammar):
        assert grammar.accept(space) is None
        taken += 1
    assert 2 <= taken <= 8
    assert takes(begin("qwen3", True, special=special), [*ids_of("a</think>\n\n", special), *letters("12")])


def test_random_answers_read_as_thoughts_and_a_match(special: bool) -> None:
    """A model that does whatever it may: parser and grammar agree on where its thoughts end."""
    texts, rng, both = PIECES + MARKERS, random.Random(5), set()
    for number in range(60):
        thoughts = (True, None, False)[number % 3]
        name = "deepseek-r1" if thoughts is True else "qwen3"
        grammar, out = begin(name, thoughts, special=special), ""
        wish = ids_of(("</think>", "<think>ab</think>", "7")[number % 3], special)
        for place in range(60):
            may = allowed(grammar)
            token = wish[place] if place < len(wish) and wish[place] in may else rng.choice(may)
            token = EOS if EOS in may and rng.random() < 0.5 else token
            assert grammar.accept(token) is None
            if token == EOS:
                break
            out += texts[token]
        if not grammar.ended:
            continue
        thought, content = ReasoningParser(format_of(name), inside=thoughts or False).parse(out)
        assert re.fullmatch(REGEX, content), out
        both.add((thoughts, bool(thought)))
    assert {(None, True), (False, False)} <= both


def test_one_compilation_serves_requests_with_and_without_thoughts_apart() -> None:
    compiler = GrammarCompiler(backend(format_of("qwen3"), special=True), VirtualClock(1), inline=True)
    plain, thinking = (compiler.ask(Key("regex", REGEX, thoughts)) for thoughts in (False, None))
    assert not isinstance(plain.result().start(), ReasonerGrammar)
    assert isinstance(thinking.result().start(), ReasonerGrammar)
    assert compiler.ask(Key("regex", REGEX, None)).hit


def test_thoughts_where_no_format_is_known_are_refused() -> None:
    with pytest.raises(BadRequest, match="--reasoning-parser") as found:
        backend(None, special=True).compile(Key("regex", REGEX, True))
    assert found.value.param == "require_reasoning"
    assert backend(None, special=True).compile(Key("regex", REGEX)).start() is not None
