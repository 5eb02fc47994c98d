"""The JSON schema that an answer is put under when a call is required: an array of calls.

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


def calls_schema(tools: Sequence[ToolSpec], *, several: bool) -> dict[str, Any]:
    """`[{"name": ..., "parameters": {...}}, ...]` with at least one call of one of `tools`; `several`: or more.

    Raises:
        RecursionError: a schema is nested too deeply.
    """
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tool) for tool in tools]},
        "$defs": {tool.name: _moved(tool.parameters or {"type": "object"}, tool.name) for tool in tools},
    }
    if not several:
        schema["maxItems"] = 1
    return schema


def _call(tool: ToolSpec) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{tool.name}"}},
        "required": ["name", "parameters"],
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
