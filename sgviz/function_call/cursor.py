"""Reading a text that arrives in pieces: a cursor, markers that may be cut, white space at borders.

Mirrors the buffers of SGLang's BaseFormatDetector; here nothing is read twice but a short tail.
Imports: nothing of sgviz.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(slots=True)
class Cursor:
    """A place in what has arrived. `last`: nothing more will."""

    text: str = ""
    at: int = 0
    last: bool = False

    def add(self, text: str) -> None:
        """Drop what was read, append `text`."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    @property
    def left(self) -> int:
        """Characters not read yet."""
        return len(self.text) - self.at

    def take(self, end: int) -> str:
        """The text up to position `end`, which is read with that."""
        piece = self.text[self.at : end]
        self.at = end
        return piece

    def take_rest(self) -> str:
        return self.take(len(self.text))

    def take_spaces(self) -> str:
        """The white space that comes next, as far as it has arrived."""
        found = _SPACES.match(self.text, self.at)
        return self.take(found.end()) if found else ""

    def follows(self, marker: str) -> bool | None:
        """Whether `marker` comes next; None: what has arrived does not tell yet."""
        if self.text.startswith(marker, self.at):
            return True
        undecided = self.left < len(marker) and marker.startswith(self.text[self.at :]) and not self.last
        return None if undecided else False


class Markers:
    """Texts to look for; none is the beginning of another."""

    def __init__(self, *markers: str) -> None:
        self.texts = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._firsts = tuple({marker[0]: None for marker in markers})
        self._most = max(map(len, markers)) - 1

    def find(self, cursor: Cursor) -> tuple[int, str] | None:
        """`(position, marker)` of the first one ahead."""
        found = self._pattern.search(cursor.text, cursor.at)
        return (found.start(), found.group()) if found else None

    def safe_end(self, cursor: Cursor) -> int:
        """Up to which position the text ahead, in which `find` finds nothing, can hold no part of a marker."""
        text, end = cursor.text, len(cursor.text)
        if cursor.last:
            return end
        start = max(cursor.at, end - self._most)
        if all(text.find(first, start) < 0 for first in self._firsts):
            return end
        for at in range(start, end):
            tail = text[at:]
            if any(marker.startswith(tail) for marker in self.texts):
                return at
        return end


class Spaces:
    """White space where two kinds of text meet belongs to neither; elsewhere it is kept.

    So trailing white space waits until it is clear what follows. Where this kind of text goes on behind the
    other, the white space before the other parts them, or if there was none that behind it.
    `at_border`: so the text begins.
    """

    def __init__(self, at_border: bool = False) -> None:
        self._waiting: list[str] = []
        self._some = False  # text that is no white space was let through
        self._at_border = self._drops = at_border

    def through(self, text: str) -> str:
        """What of `text`, and of what waited, may go on now."""
        if self._drops:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            if text:
                self._waiting.append(text)
            return ""
        self._at_border = self._drops = False
        self._some = True
        out = "".join(self._waiting) + kept
        rest = text[len(kept) :]
        self._waiting = [rest] if rest else []
        return out

    def border(self) -> None:
        """Another kind of text begins here."""
        if not self._some:
            self._waiting.clear()
        self._at_border = True
        self._drops = bool(self._waiting) or not self._some

    def rest(self) -> str:
        """What still waits, at the end of the whole text."""
        out = "" if self._at_border else "".join(self._waiting)
        self._waiting.clear()
        return out


_SPACES = re.compile(r"\s+")
