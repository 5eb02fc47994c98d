"""PythonDetector: what the formats that hold Python expressions share: collect one, then read it as a whole.

SGLang has such a buffer in each of its detectors. Imports: function_call.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from sgviz.function_call.detector import FormatDetector, State
from sgviz.function_call.json_call import Brackets
from sgviz.function_call.python_literal import Calls

SOURCE_LIMIT = 32_768  # characters of one expression; parsing it takes some ms
Reader = Callable[[str, Container[str]], Calls | None]


class PythonDetector(FormatDetector):
    """Adds the state inside of an expression."""

    def __init__(self, names: Container[str], read: Reader) -> None:
        super().__init__(names)
        self._read = read
        self._parts: list[str] = []
        self._left = SOURCE_LIMIT

    def _go_expression(self, after: State) -> bool:
        """A bracketed expression comes next, and then `after`; it is calls as a whole or not at all."""
        self._value, self._after_call = Brackets("\"'", never=""), after
        self._parts, self._left = [], SOURCE_LIMIT
        return self._go(self._expression)

    def _expression(self) -> bool:
        text = self._value.take(self._cursor, self._left)
        self._left -= len(text)
        self._parts.append(text)
        self._held.append(text)
        if not self._value.done:
            return not self._left and self._no_call()
        calls = self._read("".join(self._parts), self._names)
        if calls is None:
            return self._no_call()
        for name, arguments in calls:
            self.begin(name)
            self.argue(arguments)
        return self._go(self._after_call)
