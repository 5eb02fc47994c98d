"""The functions that a chat request offers: their shape in the body, which are in use, what is demanded of them.

Mirrors the tool half of SGLang's OpenAIServingChat and its protocol.
Imports: errors, function_call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from sgviz.errors import BadRequest, suggest
from sgviz.function_call import ToolSpec, calls_schema

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_DEPTH = 64  # of a schema
Mode = Literal["none", "auto", "required"]


class FunctionSpec(msgspec.Struct, frozen=True):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    function: FunctionSpec
    type: str = "function"


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class ToolChoice(msgspec.Struct, frozen=True):
    """One function by its name."""

    function: FunctionName
    type: str = "function"


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments`: a JSON text, as OpenAI has it, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier answer made."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class OffersTools(Protocol):
    """What is read of a chat request."""

    @property
    def tools(self) -> list[Tool] | None: ...

    @property
    def tool_choice(self) -> str | ToolChoice | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None: ...


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise BadRequest for the first tool that is none."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.type != "function":
            raise BadRequest(f"{where}.type must be 'function', got {tool.type!r}", param=f"{where}.type")
        name, where = tool.function.name, f"{where}.function"
        if not NAME.fullmatch(name):
            what = "1 to 64 letters, digits, '_', '-' or '.'"
            raise BadRequest(f"{where}.name must be {what}, got {name!r}", param=f"{where}.name")
        if name in names:
            raise BadRequest(f"{where}.name: {name!r} is there twice", param=f"{where}.name")
        names.add(name)
        _check_depth(tool.function.parameters, 0, f"{where}.parameters")


def _check_depth(schema: Any, depth: int, where: str) -> None:
    if depth > MAX_DEPTH:
        raise BadRequest(f"{where} must be nested at most {MAX_DEPTH} deep", param=where)
    if isinstance(schema, Mapping | list):
        for value in schema.values() if isinstance(schema, Mapping) else schema:
            _check_depth(value, depth + 1, where)


def mode_of(request: OffersTools) -> Mode:
    """Whether calls are out of the question, possible, or demanded.

    Raises:
        BadRequest: the choice is none that there is, or cannot be made among the request's tools.
    """
    choice, tools = request.tool_choice, request.tools or []
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, ToolChoice):
        _check_named(choice, tools)
        return "required"
    if choice not in ("none", "auto", "required"):
        allowed = "none, auto, required or a function by its name"
        hint = suggest(choice, ("none", "auto", "required"))
        raise BadRequest(f"tool_choice must be {allowed}, got {choice!r}{hint}", param="tool_choice")
    if choice == "required" and not tools:
        raise BadRequest("tool_choice 'required' needs tools, and there are none", param="tool_choice")
    if choice == "auto":
        return "auto" if tools else "none"
    return "required" if choice == "required" else "none"


def _check_named(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    if choice.type != "function":
        raise BadRequest(
            f"tool_choice.type must be 'function', got {choice.type!r}", param="tool_choice.type"
        )
    names = [tool.function.name for tool in tools]
    name = choice.function.name
    if name not in names:
        there = f"there are {', '.join(names)}" if names else "there are none"
        raise BadRequest(
            f"tool_choice names the function {name!r}, which is not among tools; {there}{suggest(name, names)}",
            param="tool_choice",
        )


def demanded(request: OffersTools) -> list[FunctionSpec]:
    """The functions of which one must be called, of a request whose mode is "required"."""
    functions = [tool.function for tool in request.tools or []]
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        return [function for function in functions if function.name == choice.function.name]
    return functions


def demanded_schema(request: OffersTools) -> str:
    """The JSON schema, as text, of an answer that makes the calls demanded; a named function is called once."""
    named = isinstance(request.tool_choice, ToolChoice)
    specs = [ToolSpec(function.name, function.parameters) for function in demanded(request)]
    several = not named and request.parallel_tool_calls is not False
    return json.dumps(calls_schema(specs, several=several))


def is_strict(request: OffersTools) -> bool:
    """Whether calls must follow the schema of at least one of the tools."""
    return any(tool.function.strict for tool in request.tools or [])


def strict_specs(request: OffersTools) -> list[ToolSpec]:
    """The tools with what their arguments must be: of one that is not strict, any object."""
    functions = [tool.function for tool in request.tools or []]
    return [ToolSpec(each.name, each.parameters if each.strict else None) for each in functions]


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates expect them."""
    return [
        {"type": "function", "function": {name: value for name in ("name", "description", "parameters")
                                          if (value := getattr(tool.function, name)) is not None}}
        for tool in tools
    ]  # fmt: skip


def calls_for_template(calls: Sequence[MessageToolCall]) -> list[dict[str, Any]]:
    """Calls of an earlier answer as chat templates expect them: with their arguments as an object.

    Arguments that are no JSON (the model wrote them) stay the text they are.
    """
    return [
        {
            **({"id": call.id} if call.id is not None else {}),
            "type": call.type,
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in calls
    ]


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
