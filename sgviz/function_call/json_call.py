"""One call as a JSON object, `{"name": ..., "arguments": {...}}`, read as it arrives.

The arguments pass on as the model wrote them, from the moment the function is known; no text is parsed
twice. Mirrors the partial JSON parse of SGLang's BaseFormatDetector, which writes them anew.
Imports: function_call.cursor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from enum import Enum, auto
from typing import Protocol

from sgviz.function_call.cursor import Cursor

TOKEN_LIMIT = 256  # characters of a key, a name or a number
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LITERAL = re.compile(r"[-+.\w]+")


class Step(Enum):
    """How far a reader got: it needs more text, is through, or met what cannot be."""

    MORE = auto()
    DONE = auto()
    BAD = auto()


class Brackets:
    """Finds the end of a value that begins with a bracket or a quote, by counting.

    Args:
        quotes: characters that open and close strings.
        never: characters that such a value cannot hold outside of strings. There it is over, however many
            brackets are open: a marker begins with one.
    """

    def __init__(self, quotes: str = '"', never: str = "<`") -> None:
        self._outside = re.compile(f"[{re.escape(quotes + never)}(){{}}\\[\\]]")
        self._inside = {quote: re.compile(rf"[{quote}\\]") for quote in quotes}
        self._never = never
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self.done = self.broken = False

    def take(self, cursor: Cursor, most: int | None = None) -> str:
        """The next part of the value, all that is there; at most `most` characters. Sets `done` or `broken`."""
        text, at = cursor.text, cursor.at
        end = len(text) if most is None else min(len(text), at + most)
        while at < end and not (self.done or self.broken):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            pattern = self._inside[self._quote] if self._quote else self._outside
            found = pattern.search(text, at, end)
            at = self._see(text[found.start()], found.start()) if found else end
        return cursor.take(at)

    def _see(self, char: str, at: int) -> int:
        """Take in the special character at `at`; where to go on."""
        if self._quote:
            self._escaped = char == "\\"
            if not self._escaped:
                self._quote = ""
                self.done = self._depth == 0
        elif char in self._never:
            self.broken = True
            return at
        elif char in self._inside:
            self._quote = char
        elif char in "([{":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth <= 0
        return at + 1


class CallSink(Protocol):
    """Takes the call that is read."""

    def begin(self, name: str) -> None: ...

    def argue(self, text: str) -> None: ...


class _Want(Enum):
    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


_PUNCTUATION = {
    (_Want.OPEN, "{"): _Want.KEY_OR_END,
    (_Want.COLON, ":"): _Want.VALUE,
    (_Want.COMMA_OR_END, ","): _Want.KEY,
}
ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCall:
    """Reads one object. Until the function is known and its arguments begin, all that was read is kept in
    `held`, to be given back if it is no call; from then on (`begun`) it is one, however it goes on.

    Args:
        names: the functions there are; a call of another is no call.
    """

    def __init__(self, names: Container[str], sink: CallSink) -> None:
        self._names = names
        self._sink = sink
        self._want = _Want.OPEN
        self._key = ""
        self._name: str | None = None
        self._arguments: list[str] | None = None  # those that came before the name
        self._value: Brackets | None = None
        self._into: Callable[[str], None] | None = None  # where the text of that value goes
        self.held: list[str] = []
        self.begun = False

    def read(self, cursor: Cursor) -> Step:
        """Go on as far as the text goes."""
        step: Step | None = None
        while step is None:
            step = self._in_value(cursor) if self._value is not None else self._token(cursor)
        # a call that has begun stands; what follows its broken end is read as text
        return Step.DONE if step is Step.BAD and self.begun else step

    def _token(self, cursor: Cursor) -> Step | None:
        self._keep(cursor.take_spaces())
        if not cursor.left:
            return Step.MORE
        char = cursor.text[cursor.at]
        if char == "}" and self._want in (_Want.KEY_OR_END, _Want.COMMA_OR_END):
            self._keep(cursor.take(cursor.at + 1))
            return self._end()
        if self._want is _Want.VALUE:
            return self._begin_value(cursor, char)
        if char == '"' and self._want in (_Want.KEY, _Want.KEY_OR_END):
            return self._string(cursor, is_key=True)
        following = _PUNCTUATION.get((self._want, char))
        if following is None:
            return Step.BAD
        self._want = following
        self._keep(cursor.take(cursor.at + 1))
        return None

    def _string(self, cursor: Cursor, is_key: bool) -> Step | None:
        """A key, or the name: short strings that are read as a whole."""
        found = _STRING.match(cursor.text, cursor.at)
        if found is None:
            return Step.BAD if cursor.last or cursor.left >= TOKEN_LIMIT else Step.MORE
        if found.end() - cursor.at > TOKEN_LIMIT:
            return Step.BAD
        try:
            text: str = json.loads(found.group(), strict=False)
        except ValueError:
            return Step.BAD
        if not is_key and text not in self._names:
            return Step.BAD
        self._keep(cursor.take(found.end()))
        if is_key:
            self._key, self._want = text, _Want.COLON
        else:
            self._name, self._want = text, _Want.COMMA_OR_END
        return None

    def _begin_value(self, cursor: Cursor, char: str) -> Step | None:
        if self._key == "name" and self._name is None:
            return self._string(cursor, is_key=False) if char == '"' else Step.BAD
        of_call = self._key in ARGUMENT_KEYS and self._arguments is None
        if char not in '{["':
            return self._literal(cursor, of_call)
        self._value, self._into = Brackets(), None
        if of_call:
            if char == "[":
                return Step.BAD
            self._arguments = []
            self._into = self._arguments.append
            if char == "{" and self._name is not None:
                self._begin(self._name)
                self._into = self._sink.argue
        return None

    def _literal(self, cursor: Cursor, of_call: bool) -> Step | None:
        """A number, true, false or null; of the arguments only null is understood: there are none."""
        found = _LITERAL.match(cursor.text, cursor.at)
        size = found.end() - cursor.at if found else 0
        if not size or size > TOKEN_LIMIT:
            return Step.BAD
        if size == cursor.left:  # it may go on
            return Step.BAD if cursor.last else Step.MORE
        if of_call and not cursor.text.startswith("null", cursor.at):
            return Step.BAD
        self._keep(cursor.take(cursor.at + size))
        self._want = _Want.COMMA_OR_END
        return None

    def _in_value(self, cursor: Cursor) -> Step | None:
        """Inside a nested value: the arguments, or what nobody asked for."""
        assert self._value is not None
        text = self._value.take(cursor)
        if text:
            self._keep(text)
            if self._into is not None:
                self._into(text)
        if self._value.broken:
            return Step.BAD
        if not self._value.done:
            return Step.MORE
        self._value, self._want = None, _Want.COMMA_OR_END
        return None

    def _end(self) -> Step:
        """The object is closed. A call that has not begun does so now, with its arguments, if any."""
        if not self.begun:
            arguments = self._whole_arguments()
            if self._name is None or arguments is None:
                return Step.BAD
            self._begin(self._name)
            self._sink.argue(arguments)
        return Step.DONE

    def _whole_arguments(self) -> str | None:
        """The arguments that were kept, which may be a string with JSON in it; None: they are no object."""
        text = "".join(self._arguments or ())
        if text.startswith('"'):
            try:
                text = json.loads(text, strict=False).strip()
                text.encode()  # half a surrogate pair could not be sent
            except ValueError:
                return None
            if text and not text.startswith("{"):
                return None
        return text or "{}"

    def _begin(self, name: str) -> None:
        self.begun = True
        self.held.clear()
        self._sink.begin(name)

    def _keep(self, text: str) -> None:
        if text and not self.begun:
            self.held.append(text)
