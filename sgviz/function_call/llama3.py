"""Calls of Llama 3: JSON objects with `parameters`, behind `<|python_tag|>` or at the start, `;` between them.

Mirrors SGLang's Llama32Detector, with the Python dicts that such models write at times.
Imports: function_call.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from sgviz.function_call.constraint import ToolSpec
from sgviz.function_call.cursor import Markers
from sgviz.function_call.detector import State
from sgviz.function_call.python_detector import PythonDetector
from sgviz.function_call.python_literal import call_in_dict
from sgviz.function_call.structure import Format, call_of, free_text_with, repeated, tag

TAG = "<|python_tag|>"
_BRACE = re.compile(r"\{(\s{0,64})")


def _structure(tools: Sequence[ToolSpec], *, several: bool) -> Format:
    """Calls end the answer: what came behind one might be taken for another."""
    calls = repeated([tag("", call_of(tools, "parameters"), "")], "; ", several=several)
    marked = free_text_with([tag(TAG, calls, "")], trigger=TAG, opens=(TAG,), several=False)
    return {"type": "or", "elements": [calls, {**marked, "starts_not_with": ["{"]}]}


class Llama3Detector(PythonDetector):
    markers = (TAG,)
    opens = Markers(TAG)
    structure = staticmethod(_structure)

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names, call_in_dict)
        self._state = self._start

    def _opened(self, marker: str) -> State:
        return self._next

    def _start(self) -> bool:
        """An answer that begins with a brace is taken for a call."""
        self._say(self._cursor.take_spaces())
        if not self._cursor.left:
            return False
        return self._go(self._next if self._cursor.text[self._cursor.at] == "{" else self._text)

    def _next(self) -> bool:
        """An object comes next, in JSON or, by its first quote, in Python."""
        cursor = self._cursor
        self._held.append(cursor.take_spaces())
        if not cursor.left:
            return False
        brace = _BRACE.match(cursor.text, cursor.at)
        if brace is None:
            return self._no_call()
        if brace.end() == len(cursor.text) and len(brace[1]) < 64 and not cursor.last:
            return False
        if cursor.text.startswith("'", brace.end()):
            return self._go_expression(self._behind)
        return self._go_object(self._behind)

    def _behind(self) -> bool:
        """Another object, perhaps behind a semicolon or the marker once more."""
        cursor = self._cursor
        cursor.take_spaces()
        if not cursor.left:
            return False
        char = cursor.text[cursor.at]
        if char == ";":
            self._held.append(cursor.take(cursor.at + 1))
        return self._go(self._next if char in ";{" else self._text)
