"""One choice's text as thoughts, content and calls: the reasoning parser first, the call parser on what it leaves.

Mirrors how SGLang's OpenAIServingChat chains its two parsers. Imports: function_call, reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from sgviz.function_call import CallArguments, CallStart, Content, FunctionCallParser
from sgviz.function_call.detector import FormatDetector
from sgviz.reasoning import ReasoningFormat, ReasoningParser, Thought

Part = Thought | Content | CallStart | CallArguments


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers to one request are read.

    Attributes:
        detector: of the calls, None: there are none. names: the functions there are.
        one_call: calls after the first are left out (parallel_tool_calls: false).
        form: of the thoughts, None: they are content.
        inside: an answer begins with thoughts; None: as the format says.
    """

    detector: type[FormatDetector] | None = None
    names: Sequence[str] = ()
    one_call: bool = False
    form: ReasoningFormat | None = None
    inside: bool | None = None
    stream_reasoning: bool = True

    @property
    def plain(self) -> bool:
        """All text is content."""
        return self.detector is None and self.form is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts by which the parts are told apart."""
        calls = () if self.detector is None else self.detector.markers
        return calls if self.form is None else (*self.form.markers, *calls)


class AnswerParser:
    """Reads one choice: `feed` its text as it comes, then `finish`."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._one_call = plan.one_call
        self.reasoning = (
            None if plan.form is None else ReasoningParser(plan.form, plan.inside, plan.stream_reasoning)
        )
        self._calls = None if plan.detector is None else FunctionCallParser(plan.detector, plan.names)

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` makes certain, in order."""
        if self.reasoning is None:
            return list(self._kept(self._read_calls(Content(text))))
        return list(self._kept(self._split(self.reasoning.feed(text))))

    def finish(self) -> list[Part]:
        """What was still held back."""
        thoughts = [] if self.reasoning is None else self.reasoning.finish()
        parts: list[Part] = list(self._split(thoughts))
        if self._calls is not None:
            parts.extend(self._calls.finish())
        return list(self._kept(parts))

    def _split(self, pieces: Iterable[Thought | Content]) -> Iterator[Part]:
        for piece in pieces:
            yield from [piece] if isinstance(piece, Thought) else self._read_calls(piece)

    def _read_calls(self, piece: Content) -> Sequence[Part]:
        return [piece] if self._calls is None else self._calls.feed(piece.text)

    def _kept(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if not (self._one_call and isinstance(part, CallStart | CallArguments) and part.index > 0):
                yield part


class Codec(Protocol):
    """What counting needs of a tokenizer."""

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str: ...


class ThoughtCount:
    """Counts one choice's tokens of reasoning, the end marker's included."""

    def __init__(self, form: ReasoningFormat, codec: Codec) -> None:
        self._form = form
        self._codec = codec
        self._count = 0
        self._settled = False

    def of(self, parser: ReasoningParser, ids: list[int]) -> int:
        """The count when the choice's tokens so far are `ids` and `parser` has read their text."""
        if not parser.thought or self._settled:
            return self._count
        self._settled = not parser.thinking
        self._count = len(ids) if parser.thinking else self._end_of_thoughts(ids)
        return self._count

    def _end_of_thoughts(self, ids: list[int]) -> int:
        """Tokens up to the end marker. Where that is no token of its own, it is looked for in the text."""
        ends = []
        for marker in self._form.endings:
            match self._codec.encode(marker, add_special_tokens=False):
                case [token] if token in ids:
                    ends.append(ids.index(token) + (marker == self._form.end))
        return min(ends) if ends else self._search(ids)

    def _search(self, ids: list[int]) -> int:
        low, high = self._count, len(ids)  # what was counted before held no end
        while low < high:
            middle = (low + high) // 2
            text = self._codec.decode(ids[:middle], skip_special_tokens=False)
            ended = any(marker in text for marker in self._form.endings)
            low, high = (low, middle) if ended else (middle + 1, high)
        return low
