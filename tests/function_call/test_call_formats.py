"""Every format's recorded texts: what is in them, and that it is the same wherever the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from call_texts import ALL, CALLING, NAMES, NOT_CALLING, Recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from sgviz.config import ServeConfig
from sgviz.errors import BadRequest
from sgviz.function_call import FORMATS, Call, CallArguments, CallStart, Content, Piece, gather
from sgviz.function_call.parser import FunctionCallParser, JsonArrayDetector, detector_of

Whole = tuple[str, list[Call]]


def parser(name: str) -> FunctionCallParser:
    detector = JsonArrayDetector if name == "json_array" else detector_of(name)
    return FunctionCallParser(detector, NAMES)


def streamed(name: str, text: str, cuts: Iterable[int]) -> list[Piece]:
    """All pieces of `text`, fed in the parts that end at `cuts`."""
    reader = parser(name)
    ends = [0, *sorted(cuts), len(text)]
    pieces = [piece for at, end in pairwise(ends) for piece in reader.feed(text[at:end])]
    return [*pieces, *reader.finish()]


def expected(recorded: Recorded) -> Whole:
    calls = [Call(i, name, arguments) for i, (name, arguments) in enumerate(recorded.calls)]
    return recorded.content, calls


@pytest.mark.parametrize("recorded", ALL, ids=str)
def test_a_whole_text(recorded: Recorded) -> None:
    assert parser(recorded.format).parse(recorded.text) == expected(recorded)


@pytest.mark.parametrize("recorded", ALL, ids=str)
def test_cut_once_at_every_place_and_into_single_characters(recorded: Recorded) -> None:
    text = recorded.text
    for cut in range(len(text) + 1):
        assert gather(streamed(recorded.format, text, [cut])) == expected(recorded), cut
    assert gather(streamed(recorded.format, text, range(len(text)))) == expected(recorded)


@given(st.sampled_from(ALL), st.data())
@settings(max_examples=300, deadline=None)
def test_cut_anywhere(recorded: Recorded, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(recorded.text)), max_size=12))
    assert gather(streamed(recorded.format, recorded.text, cuts)) == expected(recorded)


MARKS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", '"', "'", "\\", ",", ";",
    ":", " ", "\n", "<", "`", "```", "(", ")", "=", "x", '"name": "add"', '"arguments": ', '"parameters": {', "add",
    "ping()", "null", "1", "{'name': 'add'}", "<|python_tag|>", "<|python_start|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "```json\n", "<｜tool▁call▁end｜>", "日", "🙂", "\ud800",
]  # fmt: skip
SOUP = st.lists(st.sampled_from(MARKS), max_size=30).map("".join)


@given(st.sampled_from([*FORMATS, "json_array"]), SOUP, st.data())
@settings(max_examples=1500, deadline=None)
def test_no_text_raises_and_no_cut_changes_what_comes_out(name: str, text: str, data: st.DataObject) -> None:
    """Of any soup of markers: the same in pieces, pieces in order, and content that is a part of the text."""
    whole = parser(name).parse(text)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    pieces = streamed(name, text, cuts)
    assert gather(pieces) == whole
    index = -1
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == index + 1 and piece.name in NAMES
            index += 1
        elif isinstance(piece, CallArguments):
            assert piece.index == index and piece.text
        else:
            assert piece.text
    if not whole[1] and name != "pythonic":  # which takes its two tags for no text
        assert whole[0] == text


@pytest.mark.parametrize("recorded", CALLING, ids=str)
def test_arguments_come_while_they_are_written(recorded: Recorded) -> None:
    """Fed by character, long arguments come in many pieces, the name before all of them."""
    pieces = streamed(recorded.format, recorded.text, range(len(recorded.text)))
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [piece.name for piece in starts] == [name for name, _ in recorded.calls]
    longest = max((arguments for _, arguments in recorded.calls), key=len)
    count = sum(isinstance(piece, CallArguments) for piece in pieces)
    assert count == len(recorded.calls) if recorded.at_once else count >= len(longest) - 1


def test_what_arguments_are_passed_on_is_json_if_the_model_wrote_json() -> None:
    whole = [recorded for recorded in CALLING if recorded.text.endswith(("}", ">", "]", ".", "\n"))]
    for recorded in whole:
        for call in parser(recorded.format).parse(recorded.text)[1]:
            if call.parameters.count("{") == call.parameters.count("}"):
                assert isinstance(json.loads(call.parameters), dict)


def test_content_comes_at_once_but_for_what_may_be_a_marker() -> None:
    reader = parser("qwen25")
    assert reader.feed("Hello") == [Content("Hello")]
    assert reader.feed(" <b>") == [Content(" <b>")]
    assert reader.feed(" <tool") == []
    assert reader.feed("s> and") == [Content(" <tools> and")]
    assert reader.feed("\n") == []
    assert reader.finish() == [Content("\n")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "add", "parameters": {"a": 1}}]', "", [("add", '{"a": 1}')]),
        (
            '[{"name": "add", "parameters": {"a": 1}}, {"name": "ping", "parameters": {}}]',
            "",
            [("add", '{"a": 1}'), ("ping", "{}")],
        ),
        ('[{"name": "add", "parameters": {"a": [1, 2', "", [("add", '{"a": [1, 2')]),
        ('[{"name": "ad', '[{"name": "ad', []),
    ],
)
def test_the_array_of_a_demanded_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    wanted = content, [Call(i, name, arguments) for i, (name, arguments) in enumerate(calls)]
    assert parser("json_array").parse(text) == wanted
    for cut in range(len(text)):
        assert gather(streamed("json_array", text, [cut])) == wanted
    assert gather(streamed("json_array", text, range(len(text)))) == wanted


def test_the_setting_names_the_formats_there_are() -> None:
    literal, _ = get_args(get_type_hints(ServeConfig)["tool_call_parser"])
    assert get_args(literal) == tuple(FORMATS)
    for name in FORMATS:
        assert detector_of(name).markers
    with pytest.raises(BadRequest, match=r"qwen25.*got 'qwen2'.*did you mean"):
        detector_of("qwen2")


def test_recorded_texts_cover_every_format() -> None:
    called, refused = ({recorded.format for recorded in texts} for texts in (CALLING, NOT_CALLING))
    assert called | {"qwen"} == set(FORMATS) and len(refused) == 5
