"""FormatDetector: what the state machines of all formats share.

Text goes in piece by piece; content and calls come out as early as they are certain, and cut anywhere it
gives the same. Mirrors SGLang's BaseFormatDetector. Here whatever turns out to be no call comes out as
content, and a call that has begun stands, its arguments as far as they were written.
Imports: function_call.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import ClassVar

from sgviz.function_call.cursor import Cursor, Markers, Spaces
from sgviz.function_call.json_call import Brackets, JsonCall, Step
from sgviz.function_call.pieces import CallArguments, CallStart, Content, Piece, merged
from sgviz.function_call.structure import Structure

HEAD_LIMIT = 256  # characters between a marker and the arguments where a name stands there
State = Callable[[], bool]


class FormatDetector(ABC):
    """Takes one answer apart. `feed` its text, then `finish`; nothing of it is lost.

    Attributes:
        markers: texts of the format that a tokenizer may hold as special tokens.
        opens: texts behind which a call may come.
        structure: its calls as a structural tag, for strict tools; None: a grammar cannot hold it to them.

    Args:
        names: the functions there are.
    """

    markers: ClassVar[tuple[str, ...]]
    opens: ClassVar[Markers]
    structure: ClassVar[Structure | None] = None

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._cursor = Cursor()
        self._spaces = Spaces()
        self._held: list[str] = []  # read since a marker, and given back if no call follows
        self._out: list[Piece] = []
        self._calls = 0
        self._call = JsonCall(names, self)
        self._value = Brackets()
        self._state: State = self._text
        self._after_call: State = self._text

    def feed(self, text: str) -> list[Piece]:
        """What `text` makes certain."""
        self._cursor.add(text)
        return self._run()

    def finish(self) -> list[Piece]:
        """What remains when the answer has ended."""
        self._cursor.last = True
        pieces = self._run()
        self._give_back()
        rest = self._cursor.take_rest()
        if not (self._state == self._object and self._call.begun):  # there it is half a key of a known call
            self._say(rest)
        pieces.extend(self._taken())
        if spaces := self._spaces.rest():
            pieces.append(Content(spaces))
        return merged(pieces)

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        return self._taken()

    def _taken(self) -> list[Piece]:
        out, self._out = merged(self._out), []
        return out

    # ---------------------------------------------------------------- what readers of calls tell

    def begin(self, name: str) -> None:
        """A call of `name` begins."""
        self._held.clear()
        self._spaces.border()
        self._out.append(CallStart(self._calls, name))
        self._calls += 1

    def argue(self, text: str) -> None:
        """The latest call's arguments go on."""
        if text:
            self._out.append(CallArguments(self._calls - 1, text))

    # ---------------------------------------------------------------- states: True when there is more to do

    def _text(self) -> bool:
        """Content, up to a marker."""
        found = self.opens.find(self._cursor)
        if found is None:
            self._say(self._cursor.take(self.opens.safe_end(self._cursor)))
            return False
        at, marker = found
        self._say(self._cursor.take(at))
        self._held.append(self._cursor.take(at + len(marker)))
        self._state = self._opened(marker)
        return True

    @abstractmethod
    def _opened(self, marker: str) -> State:
        """The state behind `marker`, which is held."""

    def _object(self) -> bool:
        """A call as a JSON object."""
        step = self._call.read(self._cursor)
        if step is Step.MORE:
            return False
        if step is Step.BAD:
            return self._no_call()
        return self._go(self._after_call)

    def _arguments(self) -> bool:
        """The bare arguments of a call that has begun."""
        self.argue(self._value.take(self._cursor))
        if not (self._value.done or self._value.broken):
            return False
        return self._go(self._after_call)

    # ---------------------------------------------------------------- moves

    def _go(self, state: State) -> bool:
        self._state = state
        return True

    def _go_object(self, after: State) -> bool:
        """A JSON object comes next, and then `after`."""
        self._call = JsonCall(self._names, self)
        self._after_call = after
        return self._go(self._object)

    def _go_head(self, pattern: re.Pattern[str], after: State) -> bool | None:
        """`pattern` with the name in its first group comes next, then bare arguments, then `after`.

        None: what is there does not tell yet. False: it does not, and nothing was read.
        """
        cursor = self._cursor
        brace = cursor.text.find("{", cursor.at, cursor.at + HEAD_LIMIT)
        if brace < 0:
            return None if cursor.left < HEAD_LIMIT and not cursor.last else False
        found = pattern.fullmatch(cursor.text, cursor.at, brace)
        if found is None or found[1] not in self._names:
            return False
        cursor.take(brace)
        self.begin(found[1])
        self._value, self._after_call = Brackets(), after
        return self._go(self._arguments)

    def _no_call(self) -> bool:
        """What was held is content after all, and so is what comes now."""
        self._give_back()
        return self._go(self._text)

    def _give_back(self) -> None:
        self._held.extend(self._call.held)
        self._call.held.clear()
        held = "".join(self._held)
        self._held.clear()
        self._say(held)

    def _passes(self, marker: str) -> bool | None:
        """Behind a call: go past white space and `marker`, also one cut off by the end of the text.

        None: what is there does not tell yet.
        """
        cursor = self._cursor
        cursor.take_spaces()
        follows = cursor.follows(marker)
        if follows:
            cursor.take(cursor.at + len(marker))
        elif follows is False and cursor.last and cursor.left and marker.startswith(cursor.text[cursor.at :]):
            cursor.take_rest()
            return True
        return follows

    def _say(self, text: str) -> None:
        if out := self._spaces.through(text):
            self._out.append(Content(out))
