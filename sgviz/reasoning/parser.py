"""ReasoningParser: what stands between `<think>` and `</think>` is a thought, what follows is content.

Mirrors SGLang's ReasoningParser and its detectors. White space next to the markers belongs to neither side.
Imports: errors, function_call (cursor, pieces).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from sgviz.errors import BadRequest, suggest
from sgviz.function_call.cursor import Cursor, Markers, Spaces
from sgviz.function_call.pieces import Content

THINK, END_THINK = "<think>", "</think>"


class Thought(msgspec.Struct, frozen=True):
    """Text of the reasoning."""

    text: str


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a family of models marks its thoughts.

    `starts_inside`: an answer begins with thoughts even without `start` (its prompt has it). `interrupts`:
    markers that end thoughts as well, and are content themselves.
    """

    start: str = THINK
    end: str = END_THINK
    starts_inside: bool = False
    interrupts: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may hold as special tokens."""
        return (self.start, self.end)

    @property
    def endings(self) -> tuple[str, ...]:
        return (self.end, *self.interrupts)

    def inside_after(self, text: str) -> bool | None:
        """Whether an answer that goes on from `text` goes on inside of thoughts; None: `text` holds no marker."""
        start, end = text.rfind(self.start), text.rfind(self.end)
        return None if start == end else start > end

    def inside_at_end(self, prompt: str) -> bool | None:
        """Whether the answer to a prompt begins inside of thoughts, by the marker that ends it; None: none does."""
        prompt = prompt.rstrip()
        return True if prompt.endswith(self.start) else False if prompt.endswith(self.end) else None


# values of --reasoning-parser
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek-r1": ReasoningFormat(starts_inside=True),
        "qwen3": ReasoningFormat(interrupts=("<tool_call>",)),
        "qwen3-thinking": ReasoningFormat(starts_inside=True, interrupts=("<tool_call>",)),
    }
)


def format_of(name: str) -> ReasoningFormat:
    """The format `name`. Raises BadRequest if there is none."""
    if name not in REASONING_FORMATS:
        raise BadRequest(
            f"reasoning_parser must be one of {', '.join(REASONING_FORMATS)}, "
            f"got {name!r}{suggest(name, REASONING_FORMATS)}",
            param="reasoning_parser",
        )
    return REASONING_FORMATS[name]


def marks_of(name: str | None) -> ReasoningFormat | None:
    """What a grammar must know of thoughts: the format `name`, if there is one."""
    return None if name is None else format_of(name)


class ReasoningParser:
    """Takes one answer apart. `feed` its text, then `finish`; or `parse` it whole.

    Args:
        inside: the answer begins with thoughts; None: as the format says.
        stream: thoughts come as they arrive; else all at once when they have ended.

    Attributes:
        thinking: the text so far ends inside of thoughts. thought: there were some.
    """

    def __init__(self, form: ReasoningFormat, inside: bool | None = None, stream: bool = True) -> None:
        self._form = form
        self._stream = stream
        self._cursor = Cursor()
        self._endings = Markers(*form.endings)
        self._spaces = Spaces(at_border=True)
        self._collected: list[str] = []  # thoughts that wait for their end
        self._lead: list[str] | None = []  # white space at the start, while the start marker may come yet
        self._strip = False  # content begins behind thoughts
        self._out: list[Thought | Content] = []
        self.thinking = self.thought = form.starts_inside if inside is None else inside

    def feed(self, text: str) -> list[Thought | Content]:
        """What `text` makes certain, in order."""
        self._cursor.add(text)
        self._read()
        return self._taken()

    def finish(self) -> list[Thought | Content]:
        """What was still held back: of a text that was cut while thinking, thoughts."""
        self._cursor.last = True
        self._read()
        if self.thinking:
            self._think(self._spaces.rest())
            self._tell_collected()
        return self._taken()

    def parse(self, text: str) -> tuple[str, str]:
        """`(thoughts, content)` of a whole answer, the same as from its pieces."""
        pieces = [*self.feed(text), *self.finish()]
        thoughts = (piece.text for piece in pieces if isinstance(piece, Thought))
        return "".join(thoughts), "".join(piece.text for piece in pieces if isinstance(piece, Content))

    def _taken(self) -> list[Thought | Content]:
        out, self._out = self._out, []
        return out

    def _read(self) -> None:
        if self._lead is not None and not self._begins(self._lead):
            return
        if self.thinking:
            self._thoughts()
        if not self.thinking:
            text = self._cursor.take_rest()
            text = text.lstrip() if self._strip else text
            if text:
                self._strip = False
                self._out.append(Content(text))

    def _begins(self, lead: list[str]) -> bool:
        """At the very start: whether it is clear if the start marker is there. If it is, go past it."""
        lead.append(self._cursor.take_spaces())
        follows = self._cursor.follows(self._form.start)
        if follows is None:
            return False
        self._lead = None
        if follows:
            self._cursor.take(self._cursor.at + len(self._form.start))
            self.thinking = self.thought = True
        elif not self.thinking and (spaces := "".join(lead)):
            self._out.append(Content(spaces))
        return True

    def _thoughts(self) -> None:
        found = self._endings.find(self._cursor)
        end = found[0] if found else self._endings.safe_end(self._cursor)
        self._think(self._spaces.through(self._cursor.take(end)))
        if found is None:
            return
        self.thinking, self._strip = False, True
        if found[1] == self._form.end:
            self._cursor.take(end + len(found[1]))
        self._tell_collected()

    def _think(self, text: str) -> None:
        if text and self._stream:
            self._out.append(Thought(text))
        elif text:
            self._collected.append(text)

    def _tell_collected(self) -> None:
        if self._collected:
            self._out.append(Thought("".join(self._collected)))
            self._collected.clear()
