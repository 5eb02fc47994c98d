"""Structural tags: free text in which a trigger begins a tag, and a tag has content of a known form.

Two shapes, as in SGLang: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and `{"format": ...}`, a
tree of the formats that xgrammar names. Both become one Lark grammar. Simplified: of the formats those in `FORMATS`.
Free text takes `excludes`, texts that it must not hold, and `starts_not_with`, texts that it must not begin with.
Imports: grammar, errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sgviz.errors import BadRequest, suggest
from sgviz.grammar.text import Whitespace, inline_json, literal, split_special

Json = Mapping[str, Any]
TEXT = "TEXT: /(.|\\n)*/"
ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)


def structural_tag_grammar(text: str, special: Mapping[str, int], whitespace: Whitespace) -> str:
    """The Lark grammar of a structural tag, given as JSON.

    Args:
        special: special tokens and their ids; where one stands in a begin or an end, that token is meant.

    Raises:
        BadRequest: a part is missing, unknown, or cannot be expressed; with its place.
    """
    try:
        tag = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"it is no JSON: {error}") from None
    if not isinstance(tag, Mapping):
        raise BadRequest("it must be a JSON object")
    rules = _Rules(special, whitespace)
    rules.start(rules.of(tag["format"], "format") if "format" in tag else rules.legacy(tag))
    return rules.lark()


class _Rules:
    """Collects the rules; every method returns what stands for its part inside another rule."""

    def __init__(self, special: Mapping[str, int], whitespace: Whitespace) -> None:
        self._special = special
        self._whitespace = whitespace
        self._lines: list[str] = []
        self._names = 0

    def start(self, body: str) -> None:
        self._lines.insert(0, f"start: {body}")

    def lark(self) -> str:
        return "\n".join(["%llguidance {}", *self._lines, TEXT, ""])

    def of(self, format: Any, where: str) -> str:
        """Any format, by its type."""
        if not isinstance(format, Mapping):
            raise BadRequest(f"{where} must be an object")
        kind = format.get("type")
        make = FORMATS.get(kind) if isinstance(kind, str) else None
        if make is None:
            known = ", ".join(FORMATS)
            raise BadRequest(f"{where}.type must be one of {known}, got {kind!r}{suggest(kind, FORMATS)}")
        return make(self, format, where)

    def legacy(self, tag: Json) -> str:
        """Structures and triggers: the content of each structure is its schema."""
        if "structures" not in tag or "triggers" not in tag:
            raise BadRequest("it needs either format, or structures and triggers")
        tags = [
            {**item, "content": {"type": "json_schema", "json_schema": item.get("schema", {})}}
            for item in _objects(tag["structures"], "structures")
        ]
        return self.triggered_tags({"tags": tags, "triggers": tag["triggers"]}, "structures")

    def const_string(self, format: Json, where: str) -> str:
        return literal(_text(format, "value", where), self._special) or '""'

    def json_schema(self, format: Json, where: str) -> str:
        return inline_json(format.get("json_schema"), self._whitespace)

    def regex(self, format: Json, where: str) -> str:
        # Lark ends a pattern at the first slash that is not escaped; one that is may be so already
        pattern = _text(format, "pattern", where)
        pattern = ESCAPED_OR_SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], pattern)
        return self._rule(self._terminal(f"/{pattern}/"))

    def any_text(self, format: Json, where: str) -> str:
        """Any text, but for what the format says that it is not."""
        text = "TEXT"
        if excludes := _strings(format, "excludes", where):
            text += f" & ~(TEXT ({_any_of(excludes)}) TEXT)"
        if starts := _strings(format, "starts_not_with", where):
            text += f" & ~(/\\s*/ ({_any_of(starts)}) TEXT)"
        return "TEXT" if text == "TEXT" else self._terminal(text)

    def sequence(self, format: Json, where: str) -> str:
        parts = _objects(format.get("elements"), f"{where}.elements")
        return self._rule(" ".join(self.of(part, f"{where}.elements[{i}]") for i, part in enumerate(parts)))

    def either(self, format: Json, where: str) -> str:
        parts = _objects(format.get("elements"), f"{where}.elements")
        return self._rule(" | ".join(self.of(part, f"{where}.elements[{i}]") for i, part in enumerate(parts)))

    def tag(self, format: Json, where: str) -> str:
        begin = literal(_text(format, "begin", where), self._special)
        return self._rule(f"{begin} {self._inside(format, where)}")

    def triggered_tags(self, format: Json, where: str) -> str:
        """Free text and tags by turns; the first characters of a tag are its trigger, and then it must go on."""
        triggers = _texts(format.get("triggers"), f"{where}.triggers")
        text = self.any_text(format, where)
        options = []
        for place, tag in enumerate(_objects(format.get("tags"), f"{where}.tags")):
            begin = _text(tag, "begin", f"{where}[{place}]")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise BadRequest(
                    f"{where}[{place}].begin {begin!r} begins with none of the triggers {triggers}"
                )
            rest = literal(begin[len(trigger) :], self._special)
            inside = self._inside(tag, f"{where}[{place}]")
            options.append(self._rule(f"{self._trigger(trigger, text)} {rest} {inside}"))
        return self._repeated(options, format, text)

    def tags_with_separator(self, format: Json, where: str) -> str:
        """Tags with the same text between any two of them."""
        tags = _objects(format.get("tags"), f"{where}.tags")
        one = self._rule(" | ".join(self.tag(tag, f"{where}.tags[{i}]") for i, tag in enumerate(tags)))
        separator = literal(_text(format, "separator", where), self._special)
        several = one if format.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._rule(several if format.get("at_least_one") else f"({several})?")

    def _repeated(self, options: Sequence[str], format: Json, text: str) -> str:
        one = self._rule(" | ".join(options))
        if format.get("stop_after_first"):
            return self._rule(one if format.get("at_least_one") else f"{one} | {text}")
        return self._rule(f"{one} ({one})* {text}" if format.get("at_least_one") else f"({one})* {text}")

    def _inside(self, tag: Json, where: str) -> str:
        """Content and end of a tag. Free text ends with the first end."""
        content, end = tag.get("content"), _text(tag, "end", where)
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            text = self.any_text(content, f"{where}.content")
            if any(piece in self._special for piece in split_special(end, self._special)):
                return f"{text} {literal(end, self._special)}"
            return self._lazy(text, end)
        return f"{self.of(content, f'{where}.content')} {literal(end, self._special)}"

    def _trigger(self, trigger: str, text: str) -> str:
        """Free text up to the trigger and with it."""
        pieces = list(split_special(trigger, self._special))
        if pieces[0] in self._special:
            return f"{text} {literal(trigger, self._special)}"
        if len(pieces) > 1:
            raise BadRequest(f"the trigger {trigger!r} may have a special token at its beginning only")
        return self._lazy(text, trigger)

    def _lazy(self, text: str, end: str) -> str:
        name = self._name("upto")
        self._lines.append(f"{name}[lazy]: {text} {json.dumps(end)}")
        return name

    def _terminal(self, body: str) -> str:
        name = self._name("T").upper()
        self._lines.append(f"{name}: {body}")
        return name

    def _rule(self, body: str) -> str:
        name = self._name("r")
        self._lines.append(f"{name}: {body}")
        return name

    def _name(self, stem: str) -> str:
        self._names += 1
        return f"{stem}_{self._names}"


FORMATS: Mapping[str, Callable[[_Rules, Json, str], str]] = MappingProxyType({
    "const_string": _Rules.const_string,
    "json_schema": _Rules.json_schema,
    "regex": _Rules.regex,
    "any_text": _Rules.any_text,
    "sequence": _Rules.sequence,
    "or": _Rules.either,
    "tag": _Rules.tag,
    "triggered_tags": _Rules.triggered_tags,
    "tags_with_separator": _Rules.tags_with_separator,
})  # fmt: skip


def _text(part: Json, name: str, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name} must be a string, got {json.dumps(value)[:60]}")
    return value


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise BadRequest(f"{where} must be a list of texts, none of them empty")
    return value


def _strings(format: Json, name: str, where: str) -> list[str]:
    """A list of texts that may be absent."""
    return [] if format.get(name) is None else _texts(format[name], f"{where}.{name}")


def _any_of(texts: Sequence[str]) -> str:
    return " | ".join(json.dumps(text) for text in texts)


def _objects(value: Any, where: str) -> list[Json]:
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        raise BadRequest(f"{where} must be a list of objects, not empty")
    return value
