"""Calls as `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`.

Mirrors SGLang's MistralDetector; here the arguments of the compact form pass on as they come, too.
Imports: function_call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sgviz.function_call.constraint import ToolSpec, calls_schema
from sgviz.function_call.cursor import Markers
from sgviz.function_call.detector import State
from sgviz.function_call.json_array import JsonArrayDetector
from sgviz.function_call.structure import Format, free_text_with, json_of, tag

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*")


def _structure(tools: Sequence[ToolSpec], *, several: bool) -> Format:
    """Both forms: the older with an array, and the compact one."""
    array = json_of(calls_schema(tools, several=several, key="arguments"))
    space = {"type": "regex", "pattern": " ?"}  # vocabularies differ in it
    calls = [tag(CALLS, {"type": "sequence", "elements": [space, array]}, "")]
    calls += [tag(f"{CALLS}{tool.name}{ARGS}", json_of(tool.schema), "") for tool in tools]
    return free_text_with(calls, trigger=CALLS, opens=(CALLS,), several=several)


class MistralDetector(JsonArrayDetector):
    markers = (CALLS, ARGS, CALL_ID)
    opens = Markers(CALLS)
    structure = staticmethod(_structure)

    def _opened(self, marker: str) -> State:
        return self._behind_marker

    def _behind_marker(self) -> bool:
        cursor = self._cursor
        self._held.append(cursor.take_spaces())
        if not cursor.left:
            return False
        char = cursor.text[cursor.at]
        if char == "[":
            self._held.append(cursor.take(cursor.at + 1))
            return self._go(self._item)
        if char == "{":
            return self._go_object(self._text)
        return self._go(self._head)

    def _head(self) -> bool:
        found = self._go_head(_HEAD, self._text)
        return self._no_call() if found is False else bool(found)
