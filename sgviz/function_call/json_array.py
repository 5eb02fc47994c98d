"""Calls as a JSON array, `[{"name": ..., "parameters": {...}}, ...]`: what the grammar of a required call gives.

Mirrors SGLang's JsonArrayParser. Imports: function_call.
"""

from __future__ import annotations

from typing import ClassVar

from sgviz.function_call.cursor import Markers
from sgviz.function_call.detector import FormatDetector, State


class JsonArrayDetector(FormatDetector):
    """The array begins the answer, or stands behind a marker of the format that has one."""

    markers: ClassVar[tuple[str, ...]] = ()
    opens = Markers("[")

    def _opened(self, marker: str) -> State:
        return self._item

    def _item(self) -> bool:
        return self._go_object(self._behind_item)

    def _behind_item(self) -> bool:
        cursor = self._cursor
        cursor.take_spaces()
        if not cursor.left:
            return False
        char = cursor.text[cursor.at]
        if char not in ",]":
            return self._go(self._text)
        taken = cursor.take(cursor.at + 1)
        if char == ",":
            self._held.append(taken)
        return self._go(self._item if char == "," else self._text)
