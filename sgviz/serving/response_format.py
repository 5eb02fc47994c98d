"""The form that an answer must have: `response_format` and SGLang's own fields, as one field of SamplingParams.

Mirrors the response formats of SGLang's OpenAI protocol. `strict` changes nothing: a schema always binds.
Imports: errors.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from sgviz.errors import BadRequest

ANY_OBJECT = '{"type":"object"}'
Schema = dict[str, Any] | bool


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A schema under a name, as OpenAI wants it."""

    name: str
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`text`, `json_object`, `json_schema`, or `structural_tag` with its structures and triggers, or its format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class Constrained(Protocol):
    """A body that may ask for a form."""

    @property
    def response_format(self) -> ResponseFormat | None: ...
    @property
    def json_schema(self) -> str | Schema | None: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def ebnf(self) -> str | None: ...
    @property
    def structural_tag(self) -> str | dict[str, Any] | None: ...


def grammar_of(request: Constrained) -> dict[str, str]:
    """The grammar field of SamplingParams that the body asks for; empty if it asks for none.

    Raises:
        BadRequest: it asks for more than one, or a format lacks what it needs.
    """
    own = {
        "json_schema": request.json_schema,
        "regex": request.regex,
        "ebnf": request.ebnf,
        "structural_tag": request.structural_tag,
    }
    found = {name: as_text(value) for name, value in own.items() if value is not None}
    if request.response_format is None:
        return found
    formatted = _of_format(request.response_format)
    if formatted and found:
        given = " and ".join(found)
        raise BadRequest(
            f"response_format {request.response_format.type} and {given}: an answer has one form",
            param="response_format",
        )
    return formatted or found


def as_text(value: str | Schema) -> str:
    """JSON as text; a text is taken as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _of_format(format: ResponseFormat) -> dict[str, str]:
    if format.type == "text":
        return {}
    if format.type == "json_object":
        return {"json_schema": ANY_OBJECT}
    if format.type == "json_schema":
        if format.json_schema is None or format.json_schema.schema is None:
            missing = "json_schema" if format.json_schema is None else "json_schema.schema"
            raise _required(f"response_format.{missing}")
        return {"json_schema": as_text(format.json_schema.schema)}
    if format.format is not None:
        return {"structural_tag": as_text({"format": format.format})}
    for name in ("structures", "triggers"):
        if getattr(format, name) is None:
            raise _required(f"response_format.{name}")
    return {"structural_tag": as_text({"structures": format.structures, "triggers": format.triggers})}


def _required(where: str) -> BadRequest:
    return BadRequest(f"{where}: this field is required", param=where)
