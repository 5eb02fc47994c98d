"""Seeded JSON schemas and regular expressions: bounded, so that what is under them ends, and checkable in Python."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("red", "green", "blue", "on", "off", "a-b", "42", "ünïcode", 'quo"te')
KEYS = ("id", "name", "tags", "size", "next", "ok", "kind", "note")
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^[a-f0-9]{4,8}$", "^[0-2][0-9]:[0-5][0-9]$")
Schema = dict[str, Any]


def schema_of(seed: int) -> Schema:
    """A schema whose every text is short: strings, arrays, numbers and depth have bounds."""
    rng = random.Random(seed)
    schema = _object(rng, 2) if rng.random() < 0.8 else _any(rng, 2)
    if rng.random() < 0.2 and schema.get("type") == "object":
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
        schema["required"] = [*schema["required"], "leaf"]
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.5:
        return _leaf(rng)
    return rng.choice((_object, _array, _union))(rng, depth - 1)


def _leaf(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    return rng.choice((
        {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 5000)},
        {"type": "integer", "exclusiveMinimum": low, "maximum": low + 7},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": rng.sample([*WORDS, 1, -2, None, True], rng.randrange(1, 5))},
        {"const": rng.choice([*WORDS, 7, [1, "x"], {"k": None}])},
        {"type": "string", "minLength": rng.randrange(0, 3), "maxLength": rng.randrange(3, 12)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": ["string", "null"], "maxLength": 6},
    ))  # fmt: skip


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(KEYS, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {key: _any(rng, depth - 1) for key in keys},
        "required": rng.sample(keys, rng.randrange(0, len(keys) + 1)),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(0, 3)
    made: Schema = {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.2:
        made = {
            "type": "array",
            "prefixItems": [_leaf(rng), _leaf(rng)],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        }
    return made


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def regex_of(seed: int) -> str:
    """A regular expression in the syntax that Python and Rust share, without anything unbounded."""
    rng = random.Random(seed)
    return "".join(_piece(rng, 2) for _ in range(rng.randrange(1, 5)))


def _piece(rng: random.Random, depth: int) -> str:
    atoms = (
        lambda: rng.choice(("[0-9]", "[a-c]", "[A-Z]", "[^a-z \\n]", "[\\-+.]", "[x-z0-3]")),
        lambda: rng.choice(("ab", "Hello", "x", "\\.", " ", "\\{", "-", "\\\\", "é")),
        lambda: f"({'|'.join(_piece(rng, depth - 1) for _ in range(rng.randrange(2, 4)))})",
        lambda: f"(?:{_piece(rng, depth - 1)}{_piece(rng, depth - 1)})",
    )
    atom = rng.choice(atoms[: 4 if depth > 0 else 2])()
    single = len(atom) == 1 or atom[0] in "[(" or (atom[0] == "\\" and len(atom) == 2)
    if not single:
        return atom
    low = rng.randrange(0, 4)
    return atom + rng.choice(("", "", "?", f"{{{low},{low + rng.randrange(1, 4)}}}", f"{{{low + 1}}}"))
