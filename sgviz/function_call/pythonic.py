"""Calls as a Python list of calls: `[get_weather(city="Paris"), add(a=1, b=2)]`.

Mirrors SGLang's PythonicDetector: the list is held until its bracket closes, and is calls as a whole or not
at all. Imports: function_call.
"""

from __future__ import annotations

import re
from collections.abc import Container

from sgviz.function_call.cursor import Markers
from sgviz.function_call.detector import State
from sgviz.function_call.python_detector import PythonDetector
from sgviz.function_call.python_literal import calls_in_list

START, END = "<|python_start|>", "<|python_end|>"
_HEAD = re.compile(r"\[\s{0,16}(?:([A-Za-z_][\w.]{0,63})\s{0,16}(\()?)?")


class PythonicDetector(PythonDetector):
    markers = (START, END)
    opens = Markers("[", START, END)

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names, calls_in_list)

    def _opened(self, marker: str) -> State:
        if marker == "[":
            self._cursor.at -= 1  # it belongs to the expression
        self._held.clear()  # the other markers are no text
        return self._head if marker == "[" else self._text

    def _head(self) -> bool:
        """Whether a known function's name and `(` follow the bracket."""
        cursor = self._cursor
        found = _HEAD.match(cursor.text, cursor.at)
        assert found is not None
        if found[2] is None and found.end() == len(cursor.text) and not cursor.last:
            return False
        if found[2] is None or found[1] not in self._names:
            self._held.append(cursor.take(cursor.at + 1))
            return self._no_call()
        return self._go_expression(self._text)
