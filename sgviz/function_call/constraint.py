"""The JSON schemas of calls: of one, and of the array that an answer is put under when a call is required.

Mirrors SGLang's get_json_schema_constraint. Each function's schema stands under its name in `$defs`, with
its own references rewritten, so that two functions may use one name for different things.
Imports: nothing of sgviz.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Schema = Mapping[str, Any]


class ToolSpec(msgspec.Struct, frozen=True):
    """A function and the JSON schema of its arguments; without one any object will do."""

    name: str
    parameters: Schema | None = None

    @property
    def schema(self) -> Schema:
        """The schema of its arguments."""
        return self.parameters or {"type": "object"}


def call_schema(tools: Sequence[ToolSpec], key: str) -> dict[str, Any]:
    """`{"name": ..., key: {...}}`, a call of one of `tools`. Raises as `calls_schema`."""
    return {"anyOf": [_call(tool, key) for tool in tools], "$defs": _definitions(tools)}


def calls_schema(tools: Sequence[ToolSpec], *, several: bool, key: str = "parameters") -> dict[str, Any]:
    """`[{"name": ..., key: {...}}, ...]` with at least one call of one of `tools`; `several`: or more.

    Raises:
        RecursionError: a schema is nested too deeply.
    """
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tool, key) for tool in tools]},
        "$defs": _definitions(tools),
    }
    if not several:
        schema["maxItems"] = 1
    return schema


def _definitions(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    return {tool.name: _moved(tool.schema, tool.name) for tool in tools}


def _call(tool: ToolSpec, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/{tool.name}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, name: str) -> Any:
    """`schema` as it must be to stand under `name` in `$defs`: its references begin there."""
    if isinstance(schema, list):
        return [_moved(each, name) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {key: _moved(value, name) for key, value in schema.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        out["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return out
