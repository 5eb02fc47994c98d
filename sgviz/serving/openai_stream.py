"""The chunks of one OpenAI stream: opening, deltas and finish by choice, then usage and [DONE].

Mirrors the generator loops of SGLang's serving_chat and serving_completions. The engine's text is
cumulative and what was sent of it is kept by choice; what all chunks share is encoded once.
Imports: nothing of sgviz below this stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sgviz.serving.context import EngineOutput
from sgviz.serving.reply import Reply
from sgviz.serving.serving_base import DONE, sse

encode = msgspec.json.encode
Delta = tuple[str, bytes, int]  # what `chunk.sent` calls it, the member of the choice, characters in it


class UsageSum:
    """Token counts over the choices of one answer: prompts once each, completions all."""

    def __init__(self, n: int, report_cache: bool) -> None:
        self._n = n
        self._report_cache = report_cache
        self._latest: dict[int, Mapping[str, Any]] = {}

    def note(self, index: int, meta: Mapping[str, Any]) -> None:
        """Counters in `meta_info` are totals, so the latest replaces the one before."""
        self._latest[index] = meta

    def total(self) -> dict[str, Any]:
        """The `usage` object."""
        once = [meta for index, meta in self._latest.items() if index % self._n == 0]
        prompt = sum(meta["prompt_tokens"] for meta in once)
        completion = sum(meta["completion_tokens"] for meta in self._latest.values())
        cached = sum(meta.get("cached_tokens", 0) for meta in once)
        return self._shape(prompt, completion, cached, _thoughts(self._latest.values()))

    def of(self, index: int) -> dict[str, Any]:
        """Usage of one choice so far, for `continuous_usage_stats`."""
        meta = self._latest[index]
        cached = meta.get("cached_tokens", 0)
        return self._shape(meta["prompt_tokens"], meta["completion_tokens"], cached, _thoughts([meta]))

    def _shape(self, prompt: int, completion: int, cached: int, thoughts: int | None) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached} if self._report_cache else None,
        }
        if thoughts is not None:
            usage["reasoning_tokens"] = thoughts
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts} if thoughts else None
        return usage


def _thoughts(metas: Iterable[Mapping[str, Any]]) -> int | None:
    """The tokens of reasoning; None where none are told apart."""
    counts = [meta["reasoning_tokens"] for meta in metas if "reasoning_tokens" in meta]
    return sum(counts) if counts else None


def finish_of(reason: Mapping[str, Any]) -> tuple[str, int | str | None]:
    """`(finish_reason, matched_stop)` of the engine's finish reason."""
    return reason["type"], reason.get("matched") if reason["type"] == "stop" else None


@dataclass(slots=True)
class SentSoFar:
    """By choice: what the client has already."""

    chars: int = 0
    tokens: int = 0


class OpenAIStream(ABC):
    """Bytes of the events of one stream. Subclasses give the parts in which chat and text differ.

    Args:
        head: `id`, `object`, `created` and `model`, the same in every chunk.
        include_usage: a last chunk with usage (and `usage: null` in the others).
        continuous: usage so far in every chunk.
    """

    def __init__(
        self, head: dict[str, Any], usage: UsageSum, reply: Reply, *, include_usage: bool, continuous: bool
    ) -> None:
        self._head = head
        self._start = b"data: " + encode(head)[:-1] + b',"choices":[{"index":'
        self._usage = usage
        self._reply = reply
        self._include_usage = include_usage
        self._continuous = continuous
        self._sent: dict[int, SentSoFar] = {}

    def events_of(self, output: EngineOutput) -> bytes:
        index = output.get("index") or 0
        meta = output["meta_info"]
        self._usage.note(index, meta)
        parts: list[bytes] = []
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = SentSoFar()
            self._open(index, meta, parts)
        self._add_deltas(index, output, sent, parts)
        if meta["finish_reason"]:
            reason, matched = finish_of(meta["finish_reason"])
            reason = self._finish_reason(index, reason)
            self._reply.sent(meta["id"], index, "finish")
            parts.append(self._chunk(index, self._finish_body(), None, reason, matched))
        return b"".join(parts)

    def closing(self) -> bytes:
        usage = b""
        if self._include_usage:
            usage = sse({**self._head, "choices": [], "usage": self._usage.total()})
            self._reply.sent(self._reply.rid, 0, "usage")
        self._reply.sent(self._reply.rid, 0, "done")
        return usage + DONE

    def _open(self, index: int, meta: dict[str, Any], parts: list[bytes]) -> None:
        opening, logprobs = self._opening(index), self._opening_logprobs(index, meta)
        if opening is not None:
            part, body, chars = opening
            self._reply.sent(meta["id"], index, part, chars)
            parts.append(self._chunk(index, body, logprobs))

    def _add_deltas(self, index: int, output: EngineOutput, sent: SentSoFar, parts: list[bytes]) -> None:
        text, meta = output["text"], output["meta_info"]
        deltas = self._deltas(index, text[sent.chars :], output)
        logprobs = self._logprobs(index, meta, sent)
        if not deltas and logprobs is not None:
            deltas = [("delta", self._delta_body(""), 0)]  # tokens whose text is still held back
        sent.chars = len(text)
        for part, body, chars in deltas:
            self._reply.sent(meta["id"], index, part, chars)
            parts.append(self._chunk(index, body, logprobs))
            logprobs = None

    def _deltas(self, index: int, text: str, output: EngineOutput) -> list[Delta]:
        """What new `text` comes to. Where it is content as it is: one delta, none without text."""
        return [("delta", self._delta_body(text), len(text))] if text else []

    def _opening_logprobs(self, index: int, meta: dict[str, Any]) -> dict[str, Any] | None:
        """Those of what the opening of a choice shows."""
        return None

    def _finish_reason(self, index: int, reason: str) -> str:
        """The choice's finish_reason, `reason` being the engine's."""
        return reason

    def _chunk(
        self,
        index: int,
        body: bytes,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        matched: int | str | None = None,
    ) -> bytes:
        tail = b',"logprobs":null,"finish_reason":null,"matched_stop":null}]'
        if logprobs is not None or reason is not None:
            last = encode({"logprobs": logprobs, "finish_reason": reason, "matched_stop": matched})
            tail = b"," + last[1:] + b"]"
        usage = b""
        if self._continuous:
            usage = b',"usage":' + encode(self._usage.of(index))
        elif self._include_usage:
            usage = b',"usage":null'
        return b"%b%d,%b%b%b}\n\n" % (self._start, index, body, tail, usage)

    @abstractmethod
    def _opening(self, index: int) -> Delta | None:
        """`(part, body, characters)` of a chunk sent before any text of a choice; None: no such chunk."""

    @abstractmethod
    def _delta_body(self, text: str) -> bytes:
        """The member of a choice that holds new text, e.g. `"delta":{"content":"..."}`."""

    @abstractmethod
    def _finish_body(self) -> bytes:
        """The same member of the chunk with the finish reason."""

    @abstractmethod
    def _logprobs(self, index: int, meta: dict[str, Any], sent: SentSoFar) -> dict[str, Any] | None:
        """Logprobs of the tokens not sent yet, and `sent` moved on; None when there are none."""
