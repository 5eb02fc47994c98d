"""Python's way to write calls and values, read with `ast`: literals only, nothing is ever evaluated.

Mirrors what SGLang's PythonicDetector and Llama32Detector accept. Imports: function_call.
"""

from __future__ import annotations

import ast
import json
import math
import threading
import warnings
from collections.abc import Container
from typing import Any

from sgviz.function_call.json_call import ARGUMENT_KEYS

_WORDS = {"true": True, "false": False, "null": None}
Calls = list[tuple[str, str]]


def calls_in_list(source: str, names: Container[str]) -> Calls | None:
    """`(name, arguments as JSON)` of each call in `[f(a=1), ...]`; None if that is not what `source` is."""
    try:
        found = _parsed(source)
        if not isinstance(found, ast.List) or not found.elts:
            return None
        return [_call(each, names) for each in found.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def call_in_dict(source: str, names: Container[str]) -> Calls | None:
    """The one call in `{'name': ..., 'parameters': {...}}`; None if that is not what `source` is."""
    try:
        found = _value(_parsed(source))
        arguments = next((found[key] for key in ARGUMENT_KEYS if key in found), None) or {}
        if found.get("name") not in names or not isinstance(arguments, dict):
            return None
        return [(found["name"], _json(arguments))]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return None


_PARSING = (
    threading.Lock()
)  # catch_warnings changes the whole process, and texts are parsed in several threads


def _parsed(source: str) -> ast.expr:
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model's escapes are not this program's
        return ast.parse(source, mode="eval").body


def _call(node: ast.expr, names: Container[str]) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by keywords")
    name = _dotted(node.func)
    if name not in names:
        raise ValueError("an unknown function")
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("a double star")
        arguments[keyword.arg] = _value(keyword.value)
    return name, _json(arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(str() | bool() | int() | None as value):
            return value
        case ast.Constant(float() as value) if math.isfinite(value):
            return value
        case ast.Name(id) if id in _WORDS:
            return _WORDS[id]
        case ast.List(elts) | ast.Tuple(elts) | ast.Set(elts):
            return [_value(each) for each in elts]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values)}
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, ast.Constant(int() | float())):
            number = _value(node.operand)
            return -number if isinstance(sign, ast.USub) else number
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is no string")


def _json(arguments: dict[str, object]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a surrogate pair could not be sent
    return text
