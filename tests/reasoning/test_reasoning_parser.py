"""Thoughts and content: what is which, the same wherever the text is cut, and what a cut-off answer holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgviz.config import ServeConfig
from sgviz.errors import BadRequest
from sgviz.function_call import Content
from sgviz.reasoning import REASONING_FORMATS, ReasoningParser, Thought, format_of

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
RECORDED = [
    # format, begins inside, text, thoughts, content
    ("deepseek-r1", None, "Okay, 2 < 3.\n</think>\n\nYes.", "Okay, 2 < 3.", "Yes."),
    ("deepseek-r1", None, "<think>\nOkay.\n</think>\n\nYes.\n", "Okay.", "Yes.\n"),
    ("deepseek-r1", None, "<think></think>Yes", "", "Yes"),
    ("deepseek-r1", None, "Okay, let me think about", "Okay, let me think about", ""),
    ("deepseek-r1", None, "Okay </thin", "Okay </thin", ""),
    ("deepseek-r1", None, "a </think> b </think> c", "a", "b </think> c"),
    ("deepseek-r1", None, "a <think> b</think>c", "a <think> b", "c"),
    ("deepseek-r1", None, "", "", ""),
    ("deepseek-r1", False, "Yes, at once. 日本語", "", "Yes, at once. 日本語"),
    ("qwen3", None, "<think>\nHm. 🙂\n\n</think>\n\nYes.", "Hm. 🙂", "Yes."),
    ("qwen3", None, " \n<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", None, "\n\n Yes, <think> and </think>.", "", "\n\n Yes, <think> and </think>."),
    ("qwen3", None, "<thi", "", "<thi"),
    ("qwen3", None, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", None, "<think>I'll call it.\n" + CALL, "I'll call it.", CALL),
    ("qwen3", None, "<think>Done.</think>\n" + CALL, "Done.", CALL),
    ("qwen3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", True, "Hm. ", "Hm. ", ""),
    ("qwen3-thinking", None, "Hm.</think>Yes.", "Hm.", "Yes."),
]


def streamed(parser: ReasoningParser, text: str, cuts: Iterable[int]) -> list[Thought | Content]:
    ends = [0, *sorted(cuts), len(text)]
    pieces = [piece for at, end in pairwise(ends) for piece in parser.feed(text[at:end])]
    return [*pieces, *parser.finish()]


def joined(pieces: list[Thought | Content]) -> tuple[str, str]:
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Content))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("name", "inside", "text", "thoughts", "content"), RECORDED)
def test_recorded(
    name: str, inside: bool | None, text: str, thoughts: str, content: str, stream: bool
) -> None:
    def parser() -> ReasoningParser:
        return ReasoningParser(format_of(name), inside, stream)

    assert parser().parse(text) == (thoughts, content)
    for cuts in [*([cut] for cut in range(len(text) + 1)), range(len(text))]:
        pieces = streamed(parser(), text, cuts)
        assert joined(pieces) == (thoughts, content)
        kinds = [type(piece) for piece in pieces]
        assert kinds == sorted(kinds, key=[Thought, Content].index)
        if not stream:
            assert kinds.count(Thought) <= 1


MARKS = ["<think>", "</think>", "<tool_call>", "<", "think>", "</", " ", "\n", "a", "é", "\ud800"]


@given(
    st.sampled_from([*REASONING_FORMATS]),
    st.sampled_from([None, True, False]),
    st.lists(st.sampled_from(MARKS), max_size=16).map("".join),
    st.data(),
)
@settings(max_examples=600, deadline=None)
def test_any_text_cut_anywhere(name: str, inside: bool | None, text: str, data: st.DataObject) -> None:
    form = format_of(name)
    whole = ReasoningParser(form, inside).parse(text)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert joined(streamed(ReasoningParser(form, inside), text, cuts)) == whole
    # nothing is lost but the two markers, which white space within would unmake, and white space next to them
    without_end = text.replace("</think>", "", 1)
    kept = (text, text.replace("<think>", "", 1), without_end, without_end.replace("<think>", "", 1))
    assert "".join("".join(whole).split()) in ["".join(each.split()) for each in kept]


def test_thoughts_come_as_they_arrive_or_all_at_once() -> None:
    text = ["Let me ", "see", ".</th", "ink>", "Yes", "."]
    parser = ReasoningParser(format_of("deepseek-r1"))
    assert [parser.feed(part) for part in text] == [
        [Thought("Let me")], [Thought(" see")], [Thought(".")], [], [Content("Yes")], [Content(".")],
    ]  # fmt: skip
    parser = ReasoningParser(format_of("deepseek-r1"), stream=False)
    assert [parser.feed(part) for part in text[:4]] == [[], [], [], [Thought("Let me see.")]]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("<|Assistant|><think>\n", True), ("assistant\n<think>\n\n</think>\n\n", False), ("<think> hi\n", None)],
)
def test_the_end_of_a_prompt_says_where_the_answer_begins(prompt: str, inside: bool | None) -> None:
    assert format_of("qwen3").inside_at_end(prompt) is inside


@pytest.mark.parametrize(
    ("begun", "inside"), [("<think>so far", True), ("<think>x</think>So", False), ("So", None)]
)
def test_an_answer_that_is_continued_goes_on_where_it_was(begun: str, inside: bool | None) -> None:
    assert format_of("deepseek-r1").inside_after(begun) is inside


def test_the_setting_names_the_formats_there_are() -> None:
    literal, _ = get_args(get_type_hints(ServeConfig)["reasoning_parser"])
    assert get_args(literal) == tuple(REASONING_FORMATS)
    with pytest.raises(BadRequest, match=r"deepseek-r1.*got 'deepseek'"):
        format_of("deepseek")
