"""How calls look in a format, as a structural tag: what a grammar holds an answer to when its tools are strict.

Mirrors the `structure_info` of SGLang's detectors and the tag that its FunctionCallParser builds of them. Here a tag
is the tree that `grammar.structural_tag` reads, so a format may have more than one begin, and free text cannot hold
what the format's detector would take for the beginning of a call.
Imports: function_call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sgviz.function_call.constraint import ToolSpec, call_schema

Format = dict[str, Any]


class Structure(Protocol):
    """The answers of a format in which every call there is is one of `tools` with its schema."""

    def __call__(self, tools: Sequence[ToolSpec], *, several: bool) -> Format:
        """`several`: an answer may make more than one call; else it ends with the first.

        Raises:
            RecursionError: a schema is nested too deeply.
        """
        ...


def tag(begin: str, content: Format, end: str) -> Format:
    """`content` between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_of(schema: object) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def call_of(tools: Sequence[ToolSpec], key: str) -> Format:
    """A call as a JSON object, with its arguments under `key`."""
    return json_of(call_schema(tools, key))


def repeated(tags: Sequence[Format], separator: str, *, several: bool) -> Format:
    """One of `tags`, or several with `separator` between them."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def free_text_with(tags: Sequence[Format], *, trigger: str, opens: Sequence[str], several: bool) -> Format:
    """Text in which calls may stand, each begun by `trigger`; no other of `opens` is in it."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "stop_after_first": not several,
        "excludes": list(opens),
    }
