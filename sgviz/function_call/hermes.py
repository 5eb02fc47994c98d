"""Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: the Hermes and Qwen formats.

Mirrors SGLang's HermesDetector and Qwen25Detector, which differ in the line breaks around the object; here
white space is free, so one machine reads both. Imports: function_call.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from sgviz.function_call.constraint import ToolSpec
from sgviz.function_call.cursor import Markers
from sgviz.function_call.detector import FormatDetector, State
from sgviz.function_call.structure import Format, call_of, free_text_with, tag

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _structure(tools: Sequence[ToolSpec], *, several: bool) -> Format:
    calls = [tag(f"{OPEN}\n", call_of(tools, "arguments"), f"\n{CLOSE}")]
    return free_text_with(calls, trigger=OPEN, opens=(OPEN,), several=several)


class HermesDetector(FormatDetector):
    markers = (OPEN, CLOSE)
    opens = Markers(OPEN, CLOSE)
    structure = staticmethod(_structure)

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names)
        self._unclosed = False  # a call was read, its end marker was not

    def _opened(self, marker: str) -> State:
        return self._behind_open if marker == OPEN else self._behind_close

    def _behind_open(self) -> bool:
        return self._go_object(self._close)

    def _behind_close(self) -> bool:
        """An end marker in the text belongs to a call whose end was broken, or to none."""
        if not self._unclosed:
            return self._no_call()
        self._held.clear()
        self._unclosed = False
        return self._go(self._text)

    def _close(self) -> bool:
        passes = self._passes(CLOSE)
        if passes is None:
            return False
        self._unclosed = not passes
        return self._go(self._text)
