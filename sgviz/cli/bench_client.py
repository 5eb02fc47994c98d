"""The clients of `sgviz bench`: requests over HTTP when they are due, each measured as a client feels it.

Mirrors the request functions of SGLang's bench_serving for its backends sglang, sglang-oai and sglang-oai-chat.
The clock of a request starts when it is sent; TTFT is the first chunk with text; the gap before a chunk is shared
by its tokens; counts come from the server's usage. Imports: experiment (numbers), workload, httpx2, msgspec.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec

from sgviz.errors import BadRequest, SgvizError, Unavailable, suggest
from sgviz.workload import Request, Workload

DATA, DONE = b"data:", b"[DONE]"
ERROR_CHARS = 300


@dataclass(slots=True)
class Measured:
    """One request. Times in seconds; `start` on the client's monotonic clock, the others since then.

    Attributes:
        itl: a gap for each token after the first. stamps, counts: when chunks with text came, and their tokens.
        error: what went wrong; empty for a success.
    """

    rid: str
    prompt_tokens: int
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    itl: list[float] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


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


class Backend:
    """One kind of endpoint: its path, bodies and answers."""

    path: str
    takes_ids = True

    def body(self, rid: str, prompt: Prompt, output_tokens: int, options: Options) -> dict[str, Any]:
        raise NotImplementedError

    def take(self, data: bytes, now: float, into: Tokens) -> None:
        """Add one chunk (or the whole answer) that came `now` seconds after the request was sent."""
        raise NotImplementedError


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
    "sglang-oai": OpenAIBackend,
    "sglang-oai-chat": ChatBackend,
}


def backend_of(name: str) -> Backend:
    """BadRequest for a backend that there is not."""
    if name not in BACKENDS:
        raise BadRequest(f"no backend {name!r}{suggest(name, BACKENDS)}; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]()


class Tokens:
    """The text of one answer as it comes, and at the end the tokens of each chunk."""

    def __init__(self) -> None:
        self.text = ""
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self._stamps: list[float] = []
        self._chars: list[int] = []
        self._totals: list[int | None] = []

    def set_text(self, text: str, now: float, total: int) -> None:
        """All text so far, of `total` tokens."""
        if len(text) > len(self.text):
            self._note(len(text) - len(self.text), now, total)
        self.text = text

    def add_text(self, piece: str, now: float, total: int | None) -> None:
        """A new piece; `total` tokens so far, if the chunk says so."""
        self._note(len(piece), now, total)
        self.text += piece

    def _note(self, chars: int, now: float, total: int | None) -> None:
        self._stamps.append(now)
        self._chars.append(chars)
        self._totals.append(total)

    def usage(self, prompt: int, output: int, cached: int) -> None:
        """The newest counts stand for all before them."""
        self.prompt_tokens, self.output_tokens, self.cached_tokens = prompt, output, cached

    def into(self, out: Measured) -> None:
        """Fill in the times, with the gap before a chunk shared by its tokens."""
        out.text, out.output_tokens, out.cached_tokens = self.text, self.output_tokens, self.cached_tokens
        out.prompt_tokens = self.prompt_tokens or out.prompt_tokens
        out.stamps, out.counts = self._stamps, self._counts()
        out.ttft = self._stamps[0] if self._stamps else 0.0
        last = out.ttft
        for stamp, count in zip(out.stamps[1:], out.counts[1:]):
            out.itl += [(stamp - last) / count] * count if count else []
            last = stamp if count else last

    def _counts(self) -> list[int]:
        """Tokens of each chunk: as told, else shared out by the chunks' characters."""
        if not self._stamps:
            return []
        if any(total is None for total in self._totals):
            return share_out(self.output_tokens, self._chars)
        totals = [total or 0 for total in self._totals]
        return [totals[0], *(max(0, b - a) for a, b in zip(totals, totals[1:]))]


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts that follow `weights`; the running sum is always the nearest to its share."""
    whole, before, seen, out = sum(weights), 0, 0, []
    for weight in weights:
        seen += weight
        now = round(total * seen / whole) if whole else 0
        out.append(now - before)
        before = now
    return out


def _raise(error: Any) -> None:
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise SgvizError(str(message))


class Client:
    """Sends the requests of a workload to one server.

    Args:
        base_url: of the server, without /v1. prompts: by rid; those of later turns are not supported.
    """

    def __init__(self, base_url: str, backend: Backend, options: Options, api_key: str | None = None) -> None:
        self._backend, self._options = backend, options
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx2.AsyncClient(
            base_url=base_url, headers=headers, timeout=None, limits=limits, trust_env=False
        )

    async def close(self) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> dict[str, Any] | None:
        """The server's JSON, or None if it has no such page. Unavailable if nobody answers."""
        try:
            response = await self.http.get(path, timeout=30.0)
        except httpx2.TransportError as error:
            raise Unavailable(f"no server answers at {self.http.base_url}: {error}") from error
        try:
            found = response.json() if response.status_code == 200 else None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else None

    async def run(
        self,
        workload: Workload,
        prompts: Mapping[str, Prompt],
        on_done: Callable[[], None] = lambda: None,
        prefix: str = "",
    ) -> list[Measured]:
        """All requests, when they are due and as many at a time as the workload allows; in its order."""
        gate = asyncio.Semaphore(workload.concurrency) if workload.concurrency else None
        begun = time.perf_counter()
        tasks = [
            asyncio.create_task(self._when_due(each, prompts[each.rid], begun, gate, on_done, prefix))
            for each in workload.requests
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _when_due(
        self,
        request: Request,
        prompt: Prompt,
        begun: float,
        gate: asyncio.Semaphore | None,
        on_done: Callable[[], None],
        prefix: str,
    ) -> Measured:
        await asyncio.sleep(max(0.0, begun + request.at_s - time.perf_counter()))
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            measured = await self.ask(prefix + request.rid, prompt, request.prompt_tokens, request.output_tokens)
        on_done()
        return measured

    async def ask(self, rid: str, prompt: Prompt, prompt_tokens: int, output_tokens: int) -> Measured:
        """One request; a failure is in its `error`, never raised."""
        out, tokens = Measured(rid, prompt_tokens), Tokens()
        body = msgspec.json.encode(self._backend.body(rid, prompt, output_tokens, self._options))
        out.start = time.perf_counter()
        try:
            async with self.http.stream(
                "POST", self._backend.path, content=body, headers={"content-type": "application/json"}
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread())[:ERROR_CHARS].decode("utf-8", errors="replace")
                    raise SgvizError(f"status {response.status_code}: {text}")
                await self._read(response, out, tokens)
        except (SgvizError, msgspec.DecodeError, httpx2.TransportError) as error:
            out.error = str(error) or type(error).__name__
        tokens.into(out)
        return out

    async def _read(self, response: httpx2.Response, out: Measured, tokens: Tokens) -> None:
        if not self._options.stream:
            data = await response.aread()
            out.latency = time.perf_counter() - out.start
            self._backend.take(data, out.latency, tokens)
            return
        ended = False
        async for event in _events(response.aiter_raw()):
            if event == DONE:
                ended = True
                continue
            now = time.perf_counter() - out.start
            before = len(tokens.text)
            self._backend.take(event, now, tokens)
            out.latency = now if len(tokens.text) > before else out.latency
        if not ended:
            raise SgvizError("the stream ended without [DONE]")


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as it is whole."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(DATA):
                    yield line[len(DATA) :].strip()
