"""Arrival: one request of a virtual run. Imports: messages, errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.model.tokenizer import Tokenizer


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A client sends this `at_ns` nanoseconds after the start.

    Attributes:
        prompt: text, ids, or a number of tokens: then words are drawn by `rid` (a vocabulary of letters, whose
            letters join again, may make a few tokens more or less of them).
        output_tokens: exactly so many come back, whatever `sampling` says of lengths and endings; None: as it says.
        extra_key: requests of different keys share no KV.
    """

    at_ns: int
    rid: str
    prompt: str | tuple[int, ...] | int
    output_tokens: int | None = None
    sampling: SamplingParams = SamplingParams(temperature=0.0)
    stream: bool = False
    extra_key: str | None = None

    def params(self) -> SamplingParams:
        if self.output_tokens is None:
            return self.sampling
        return msgspec.structs.replace(self.sampling, max_new_tokens=self.output_tokens, ignore_eos=True)


AfterFinish = Callable[[str, dict[str, Any] | None, int], Iterable[Arrival]]
"""`(rid, its answer or None if it was refused, ns since the start)`: arrivals that follow from a request's end."""


class Prompter:
    """Makes requests of arrivals; a prompt given by its length is drawn as words, one token each.

    Args:
        word_ids: ids whose text comes back as that one token.
    """

    def __init__(self, tokenizer: Tokenizer, word_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._word_ids = word_ids
        self._added = tokenizer.count_tokens("")  # what the tokenizer puts around a text

    def request(self, arrival: Arrival, received_ns: int) -> GenerateReqInput:
        """What serving would hand on. BadRequest for a length below 1."""
        prompt = arrival.prompt
        if isinstance(prompt, int):
            prompt = self._words(arrival.rid, prompt)
        return GenerateReqInput(
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else list(prompt),
            rid=arrival.rid,
            sampling_params=arrival.params(),
            stream=arrival.stream,
            extra_key=arrival.extra_key,
            received_ns=received_ns,
        )

    def _words(self, rid: str, tokens: int) -> str:
        words = tokens - self._added
        if words < 1:
            least = 1 + self._added
            raise BadRequest(f"request {rid}: a prompt of {tokens} tokens; {least} at least", param="prompt")
        return self._tokenizer.decode(random.Random(rid).choices(self._word_ids, k=words))
