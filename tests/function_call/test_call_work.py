"""Work is bounded: on text made to hurt it grows as the text does, in one piece and in small ones."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from sgviz.function_call.cursor import Cursor
from sgviz.function_call.parser import FunctionCallParser, detector_of
from sgviz.reasoning import ReasoningParser, format_of

SIZE = 20_000
HURTING = [
    ("qwen25", "", "<tool_call>"),
    ("qwen25", "", '<tool_call>{"'),
    ("qwen25", "", "</tool_call>"),
    ("qwen25", "", "<"),
    ("qwen25", "<tool_call>", " "),
    ("qwen25", '<tool_call>{"', "x"),
    ("qwen25", '<tool_call>{"arguments": {"a": "', "x"),
    ("qwen25", '<tool_call>{"name": "f", "arguments": ', "{"),
    ("qwen25", '<tool_call>{"name": "f", "arguments": {"a": "', "\\"),
    ("qwen25", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    ("llama3", "", '{"name": "f", "parameters": {}};'),
    ("llama3", "", "<|python_tag|>{'"),
    ("llama3", "{", " "),
    ("mistral", "", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]", " "),
    ("mistral", "", "[TOOL_CALLS]x"),
    ("pythonic", "", "["),
    ("pythonic", "", "[f("),
    ("pythonic", "[f(", "x"),
    ("deepseekv3", "", "<｜tool▁calls▁begin｜>"),
    ("deepseekv3", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f{"),
    ("reasoning", "", "</thin"),
    ("reasoning", "", "<think>"),
    ("reasoning", "", " "),
]


class Work:
    """Counts calls of Python functions and characters laid down anew while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        add = Cursor.add

        def counting(cursor: Cursor, text: str) -> None:
            add(cursor, text)
            self.done += cursor.left // 16

        monkeypatch.setattr(Cursor, "add", counting)

    def of(self, name: str, text: str, step: int) -> int:
        parser = (
            ReasoningParser(format_of("deepseek-r1"))
            if name == "reasoning"
            else FunctionCallParser(detector_of(name), ["f"])
        )
        self.done = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            self.done += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for at in range(0, len(text), step):
                parser.feed(text[at : at + step])
            parser.finish()
        finally:
            sys.setprofile(None)
        return self.done


@pytest.mark.parametrize(("name", "start", "rest"), HURTING)
@pytest.mark.parametrize("step", [7, 1 << 30])
def test_twice_the_text_is_twice_the_work(
    name: str, start: str, rest: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(monkeypatch)
    text = start + rest * (SIZE // len(rest))
    once, twice = work.of(name, text, step), work.of(name, text + rest * (SIZE // len(rest)), step)
    assert twice <= 2.5 * once + 400
    assert twice <= 100 * len(text)


def test_a_python_list_that_does_not_end_is_let_go() -> None:
    parser = FunctionCallParser(detector_of("pythonic"), ["f"])
    text = "[f(a='" + "x" * 200_000
    early = "".join(piece.text for piece in parser.feed(text) if hasattr(piece, "text"))
    assert len(early) > 150_000
    assert early + "".join(piece.text for piece in parser.finish() if hasattr(piece, "text")) == text
