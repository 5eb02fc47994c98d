"""Calls of DeepSeek V3: `<｜tool▁calls▁begin｜>`, then each call between its own markers, with fenced JSON.

Mirrors SGLang's DeepSeekV3Detector and DeepSeekV31Detector (no fence, the name first). Imports: function_call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from sgviz.function_call.constraint import ToolSpec
from sgviz.function_call.cursor import Markers
from sgviz.function_call.detector import FormatDetector, State
from sgviz.function_call.structure import Format, free_text_with, json_of, repeated, tag

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


def _calls(calls: Sequence[Format], separator: str, *, several: bool) -> Format:
    """Calls between the markers of all of them."""
    together = tag(CALLS_BEGIN, repeated(calls, separator, several=several), CALLS_END)
    return free_text_with([together], trigger=CALLS_BEGIN, opens=(CALLS_BEGIN, CALL_BEGIN), several=several)


def _structure_v3(tools: Sequence[ToolSpec], *, several: bool) -> Format:
    calls = [
        tag(
            f"{CALL_BEGIN}function{SEPARATOR}{tool.name}\n{FENCE}json\n",
            json_of(tool.schema),
            f"\n{FENCE}{CALL_END}",
        )
        for tool in tools
    ]
    return _calls(calls, "\n", several=several)


def _structure_v31(tools: Sequence[ToolSpec], *, several: bool) -> Format:
    calls = [tag(f"{CALL_BEGIN}{tool.name}{SEPARATOR}", json_of(tool.schema), CALL_END) for tool in tools]
    return _calls(calls, "", several=several)


class DeepSeekV3Detector(FormatDetector):
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    opens = Markers(CALLS_BEGIN, CALL_BEGIN)
    structure = staticmethod(_structure_v3)
    head: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*(?:function)?\s*{SEPARATOR}\s*([\w.-]+)\s*(?:{FENCE}(?:json)?)?\s*"
    )

    def _opened(self, marker: str) -> State:
        return self._first if marker == CALLS_BEGIN else self._head

    def _first(self) -> bool:
        """Behind the opening of all calls; the first one's must follow."""
        self._held.append(self._cursor.take_spaces())
        follows = self._cursor.follows(CALL_BEGIN)
        if follows is None:
            return False
        return self._go(self._text) if follows else self._no_call()

    def _head(self) -> bool:
        found = self._go_head(self.head, self._fence)
        return self._no_call() if found is False else bool(found)

    def _fence(self) -> bool:
        return self._passes(FENCE) is not None and self._go(self._close)

    def _close(self) -> bool:
        return self._passes(CALL_END) is not None and self._go(self._close_all)

    def _close_all(self) -> bool:
        return self._passes(CALLS_END) is not None and self._go(self._text)


class DeepSeekV31Detector(DeepSeekV3Detector):
    structure = staticmethod(_structure_v31)
    head = re.compile(rf"\s*([\w.-]+)\s*{SEPARATOR}\s*")
