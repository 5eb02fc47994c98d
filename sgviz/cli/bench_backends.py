"""The endpoints that `sgviz bench` can ask: how a body looks, and what an answer's chunk says.

Mirrors the backends sglang, sglang-oai and sglang-oai-chat of SGLang's bench_serving. Imports: errors, msgspec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sgviz.cli.bench_answers import Tokens
from sgviz.errors import BadRequest, SgvizError, suggest


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Native(msgspec.Struct):
    text: str = ""
    meta_info: Meta = msgspec.field(default_factory=Meta)
    error: Any = None


class Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None

    @property
    def piece(self) -> str:
        """Generated text of any kind."""
        said = self.delta or self.message
        return (self.text or "") + ((said.content or "") + (said.reasoning_content or "") if said else "")


class OpenAI(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class Options:
    """How requests are asked. `extra` goes into every body as it is."""

    model: str
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


Prompt = list[int] | str


class Backend(ABC):
    """One kind of endpoint: its path, bodies and answers."""

    path: str
    takes_ids = True

    @abstractmethod
    def body(self, rid: str, prompt: Prompt, output_tokens: int, options: Options) -> dict[str, Any]:
        """The JSON body of one request."""

    @abstractmethod
    def take(self, data: bytes, now: float, into: Tokens) -> None:
        """Add one chunk (or the whole answer) that came `now` seconds after the request was sent."""


class NativeBackend(Backend):
    """POST /generate: text and counts are cumulative."""

    path = "/generate"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(Native).decode

    def body(self, rid: str, prompt: Prompt, output_tokens: int, options: Options) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": output_tokens, "ignore_eos": options.ignore_eos,
            "temperature": options.temperature, "top_p": options.top_p,
        }  # fmt: skip
        what = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        return {**what, "rid": rid, "sampling_params": sampling, "stream": options.stream, **options.extra}

    def take(self, data: bytes, now: float, into: Tokens) -> None:
        chunk = self._decode(data)
        _raise(chunk.error)
        meta = chunk.meta_info
        into.set_text(chunk.text, now, total=meta.completion_tokens)
        into.usage(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)


class OpenAIBackend(Backend):
    """POST /v1/completions: text comes in pieces, counts in the usage (of every chunk, where the server can)."""

    path = "/v1/completions"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(OpenAI).decode

    def body(self, rid: str, prompt: Prompt, output_tokens: int, options: Options) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": options.model, "rid": rid, **self._what(prompt, output_tokens),
            "temperature": options.temperature, "top_p": options.top_p, "ignore_eos": options.ignore_eos,
            "stream": options.stream,
        }  # fmt: skip
        if options.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return {**body, **options.extra}

    def _what(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": output_tokens}

    def take(self, data: bytes, now: float, into: Tokens) -> None:
        chunk = self._decode(data)
        _raise(chunk.error)
        piece = "".join(choice.piece for choice in chunk.choices)
        total = chunk.usage.completion_tokens if chunk.usage else None
        if piece:
            into.add_text(piece, now, total=total)
        if chunk.usage is not None:
            into.usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.cached)


class ChatBackend(OpenAIBackend):
    """POST /v1/chat/completions: prompts are texts, and the template adds its own tokens."""

    path = "/v1/chat/completions"
    takes_ids = False

    def _what(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_tokens}


BACKENDS: Mapping[str, type[Backend]] = {
    "sglang": NativeBackend,
    "sglang-native": NativeBackend,
    "sglang-oai": OpenAIBackend,
    "sglang-oai-chat": ChatBackend,
}


def backend_of(name: str) -> Backend:
    """BadRequest for a backend that there is not."""
    if name not in BACKENDS:
        raise BadRequest(f"no backend {name!r}{suggest(name, BACKENDS)}; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]()


def _raise(error: Any) -> None:
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise SgvizError(str(message))
