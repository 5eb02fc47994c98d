"""Workload: a frozen value that says what arrives when. Printed, saved and loaded as it is.

Prompts are kept as segments (a key and a length), not as ids: a file stays small, and what two prompts share
can be read off. `ids_of` makes the ids, for any vocabulary, the same ones every time.

Imports: errors, msgspec; pandas only for `table`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import msgspec

from sgviz.errors import BadRequest, SgvizError
from sgviz.workload.numbers import check_counts

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
FIRST_ID = 16  # below it many vocabularies keep their special tokens

Parameter = str | int | float | bool | None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` ids of the endless stream named `key`: two segments of one key share the shorter one's ids."""

    key: str
    tokens: int


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    Attributes:
        at_s: seconds after the start at which it arrives; with `after`, seconds after that one's end.
        prompt: its own part of the prompt. output_tokens: how many are asked for (the end token is ignored).
        after: rid of the turn before: it starts when that has ended, with that one's prompt and answer in
            front of its own part.
        history_tokens: length of what is put in front. group: what shares a prefix, or a session.
    """

    rid: str
    at_s: float
    prompt: tuple[Segment, ...]
    output_tokens: int
    after: str = ""
    history_tokens: int = 0
    group: str = ""

    @property
    def own_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return self.history_tokens + self.own_tokens


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order of arrival.

    Attributes:
        name: how it was made. parameters: with what, for reading.
        concurrency: at most so many requests at a time (a closed loop); None: all as they arrive. A request
            that must wait for its turn arrives, for every measure, when it is sent.
        vocab: `(first id, first id that is too large)` of prompts; None: from 16 up to the model's size.
    """

    name: str
    seed: int
    requests: tuple[Request, ...]
    concurrency: int | None = None
    vocab: tuple[int, int] | None = None
    parameters: dict[str, Parameter] = {}
    format: int = FORMAT

    def __post_init__(self) -> None:
        _check(self)

    @property
    def input_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def span_s(self) -> float:
        """Last arrival that is fixed in advance (seconds after the start)."""
        return max((request.at_s for request in self.requests if not request.after), default=0.0)

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request: the context that a model must have."""
        return max((request.prompt_tokens + request.output_tokens for request in self.requests), default=0)

    def ids_of(self, request: Request, vocab_size: int, history: Sequence[int] = ()) -> list[int]:
        """The whole prompt as ids below `vocab_size`.

        Args:
            history: prompt and answer of the turn before, exactly `request.history_tokens` ids.
        """
        if len(history) != request.history_tokens:
            raise BadRequest(
                f"{request.rid} follows {request.history_tokens} tokens of history, got {len(history)}"
            )
        low, high = self._range(vocab_size)
        ids = list(history)
        for segment in request.prompt:
            ids += _stream(f"{self.seed}/{segment.key}", segment.tokens, low, high)
        return ids

    def _range(self, vocab_size: int) -> tuple[int, int]:
        low, high = self.vocab or (min(FIRST_ID, vocab_size - 1), vocab_size)
        if not 0 <= low < high <= vocab_size:
            raise BadRequest(f"prompt ids {low} to {high - 1} do not fit a vocabulary of {vocab_size}")
        return low, high

    @property
    def table(self) -> pd.DataFrame:
        """One row a request: rid, at_s, prompt_tokens, output_tokens, after, group, shared_tokens."""
        import pandas as pd

        rows = [
            (each.rid, each.at_s, each.prompt_tokens, each.output_tokens, each.after, each.group)
            for each in self.requests
        ]
        return pd.DataFrame(rows, columns=["rid", "at_s", "prompt_tokens", "output_tokens", "after", "group"])

    def summary(self) -> str:
        """Two lines for a reader."""
        how = ", ".join(f"{name}={value}" for name, value in self.parameters.items() if value is not None)
        return f"{self.name}({how})\n{self._numbers()}"

    def _numbers(self) -> str:
        count = len(self.requests)
        if not count:
            return "no requests"
        prompts = [request.prompt_tokens for request in self.requests]
        outputs = [request.output_tokens for request in self.requests]
        limit = f", at most {self.concurrency} at a time" if self.concurrency else ""
        return (
            f"{count} requests over {self.span_s:,.1f} s{limit}; prompts {_span(prompts)}, outputs "
            f"{_span(outputs)} tokens; {sum(prompts):,} tokens in, {sum(outputs):,} out"
        )

    def __str__(self) -> str:
        return self.summary()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        try:
            Path(path).write_bytes(data)
        except OSError as error:
            raise SgvizError(f"cannot write the workload {str(path)!r}: {error.strerror}") from error


def load(path: str | os.PathLike[str]) -> Workload:
    """A workload that `save` wrote.

    Raises:
        SgvizError: the file is not there. BadRequest: it is no workload.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SgvizError(f"cannot read the workload {str(path)!r}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=Workload)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{str(path)!r} is no workload: {error}") from error


def _stream(key: str, count: int, low: int, high: int) -> list[int]:
    """The first `count` ids of a stream; a longer draw begins with the same ids."""
    return random.Random(key).choices(range(low, high), k=count)


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"of {low:,}" if low == high else f"of {low:,} to {high:,} (mean {mean(values):,.0f})"


def _check(workload: Workload) -> None:
    if workload.format != FORMAT:
        raise BadRequest(f"workload format {workload.format} is unknown; this sgviz reads format {FORMAT}")
    if workload.concurrency is not None:
        check_counts(concurrency=workload.concurrency)
    seen: dict[str, Request] = {}
    for request in workload.requests:
        _check_request(request, seen)
        seen[request.rid] = request


def _check_request(request: Request, seen: Mapping[str, Request]) -> None:
    if request.rid in seen:
        raise BadRequest(f"the rid {request.rid!r} occurs twice")
    if not request.at_s >= 0 or request.prompt_tokens < 1 or request.output_tokens < 1:
        raise BadRequest(f"{request.rid}: at_s must be 0 or more, prompt and output at least one token")
    if not request.after:
        if request.history_tokens:
            raise BadRequest(f"{request.rid} has history but follows no other request")
        return
    before = seen.get(request.after)
    if before is None:
        raise BadRequest(f"{request.rid} follows {request.after!r}, which does not come before it")
    if request.history_tokens != before.prompt_tokens + before.output_tokens:
        raise BadRequest(
            f"{request.rid} has {request.history_tokens} tokens of history; {before.rid} leaves "
            f"{before.prompt_tokens + before.output_tokens}"
        )
