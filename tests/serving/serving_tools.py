"""A scripted TokenizerManager and a served app for the tests of the HTTP layer.

The manager implements the Protocol: its "model" answers with words by rule, so every chunk is known. The
app runs under a real uvicorn in a thread with a loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from scripted_control import ScriptedControl

from sgviz.config import Settings
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import RingSink, Tracer
from sgviz.messages import FlushCacheReqOutput, GenerateReqInput, GetInternalStateReqOutput, SamplingParams
from sgviz.serving import (
    Keys,
    ModelFacts,
    ServerHandle,
    ServerState,
    ServerStatus,
    ServingContext,
    create_app,
    loop_factory,
)
from sgviz.tokenizer_manager.ranks import Ranks

MODEL = "tiny-test"
VOCAB = 1000
CONTEXT = 64
WORDS = [" alpha", " beta", " gamma", " delta", " epsilon"]  # the answer; token id of word i: 500 + i
EOS = 2
Step = tuple[str, list[int], dict[str, Any] | None]


class CharTokenizer:
    """One token a character: its code point; and one a word of the answer, which no prompt has."""

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(char) for char in text]

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str:
        kept = [token for token in ids if token > 2 or not skip_special_tokens]
        return "".join(WORDS[token - 500] if 0 <= token - 500 < len(WORDS) else chr(token) for token in kept)


class PlainTemplates:
    """`role:content\\n` a message; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []

    def apply(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        self.seen.append([dict(message) for message in messages])
        self.options.append(kwargs)
        if any(message["content"] == "refuse me" for message in messages):
            raise BadRequest(
                "the chat template refuses these messages: roles must alternate", param="messages"
            )
        if any(message["content"] == "break" for message in messages):
            raise ValueError("a fault of the server")
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return [ord(char) % VOCAB for char in text + "assistant:" * add_generation_prompt]


@dataclass
class ScriptedManager:
    """Answers every prompt with WORDS, one word a step, up to the limit, a stop string or the end.

    Attributes:
        gate: when set, an answer waits here after its first word (non-streamed: before its end).
        failure: raised instead of any answer. abort: finish reason given after `abort_after` words.
    """

    gate: threading.Event | None = None
    failure: Exception | None = None
    abort: dict[str, Any] | None = None
    abort_after: int = 2
    tokens_per_step: int = 1
    healthy: bool = True
    busy: int = 0
    control: ScriptedControl = field(default_factory=ScriptedControl)
    ranks: Ranks = field(default_factory=Ranks)
    requests: list[GenerateReqInput] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    closed_early: list[str] = field(default_factory=list)
    aborts: list[tuple[str, bool]] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)

    async def generate_request(
        self, obj: GenerateReqInput, is_disconnected: Any = None
    ) -> AsyncIterator[dict[str, Any] | list[dict[str, Any]]]:
        self.requests.append(obj)
        if self.failure is not None:
            raise self.failure
        rows = self._rows(obj)
        self.live.update(row["rid"] for row in rows)
        done = False
        try:
            if obj.stream:
                async for output in self._stream(rows):
                    yield output
            else:
                await self._wait()
                outputs = [self._output(row, len(row["steps"])) for row in rows]
                yield outputs if rows[0]["index"] is not None else outputs[0]
            done = True
        except GeneratorExit:
            done = not obj.stream  # a reader that has its one answer need not ask for more
            raise
        finally:
            for row in rows:
                self.live.discard(row["rid"])
                if not done:
                    self.closed_early.append(row["rid"])

    async def _stream(self, rows: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        for step in range(1, 1 + max(len(row["steps"]) for row in rows)):
            for row in rows:
                if step <= len(row["steps"]):
                    yield self._output(row, step)
            if step == 1:
                await self._wait()

    async def _wait(self) -> None:
        while self.gate is not None and not self.gate.is_set():
            await asyncio.sleep(0.005)

    def _rows(self, obj: GenerateReqInput) -> list[dict[str, Any]]:
        prompts: list[Any] = (
            [obj.text or obj.input_ids] if obj.is_single else [*(obj.text or obj.input_ids or [])]
        )
        params = obj.sampling_params
        listed = params if isinstance(params, list) else [params] * len(prompts)
        for each in listed:
            each.verify(VOCAB)
        several = not obj.is_single or listed[0].n > 1
        rows = []
        for number, (prompt, each) in enumerate(zip(prompts, listed)):
            ids = CharTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
            if not ids or any(not 0 <= token < 0x110000 for token in ids) or len(ids) >= CONTEXT:
                raise BadRequest(f"the prompt has {len(ids or [])} tokens, allowed are 1 to {CONTEXT - 1}")
            for sample in range(each.n):
                index = number * each.n + sample
                rid = f"{_at(obj.rid, number)}_{index}" if several else obj.rid
                rows.append(
                    {
                        "rid": rid,
                        "index": index if several else None,
                        "prompt": len(ids),
                        "logprob": _at(obj.return_logprob, number),
                        "tops": _at(obj.top_logprobs_num, number),
                        "steps": self._steps(each, index),
                    }
                )
        return rows

    def _steps(
        self, params: SamplingParams, index: int
    ) -> list[tuple[str, list[int], dict[str, Any] | None]]:
        """`(text, ids, finish reason)`, cumulative, by step; the answer to choice i has i words less."""
        words = WORDS[: max(1, len(WORDS) - index)]
        limit = params.max_new_tokens
        ids = [500 + i for i in range(len(words))] + [EOS]
        texts = ["".join(words[: i + 1]) for i in range(len(words))]
        texts.append(texts[-1])
        reason: dict[str, Any] = {"type": "stop", "matched": EOS}
        for i, text in enumerate(texts):
            hit = next((stop for stop in params.stop_strings if stop in text), None)
            if hit is not None:
                cut = text.index(hit)
                texts = [t[:cut] for t in texts[: i + 1]]
                ids, reason = ids[: i + 1], {"type": "stop", "matched": hit}
                break
        if limit is not None and limit < len(ids):
            ids, texts, reason = ids[:limit], texts[:limit], {"type": "length", "length": limit}
        if self.abort is not None:
            ids, texts, reason = ids[: self.abort_after], texts[: self.abort_after], self.abort
        if not ids:
            return [("", [], reason)]
        ends = [*range(self.tokens_per_step, len(ids), self.tokens_per_step), len(ids)]
        return [(texts[end - 1], ids[:end], reason if end == len(ids) else None) for end in ends]

    def _output(self, row: dict[str, Any], step: int) -> dict[str, Any]:
        text, ids, reason = row["steps"][step - 1]
        meta: dict[str, Any] = {
            "id": row["rid"],
            "finish_reason": reason,
            "prompt_tokens": row["prompt"],
            "completion_tokens": len(ids),
            "cached_tokens": 3,
        }
        if row["logprob"]:
            others = [(-3.0 - k, 600 + k, f"~{k}") for k in range(row["tops"] - 1)]
            meta["output_token_logprobs"] = [self._triple(token) for token in ids]
            meta["output_top_logprobs"] = [[self._triple(token), *others] for token in ids if row["tops"]]
        out = {"text": text, "output_ids": ids, "meta_info": meta}
        return out if row["index"] is None else {**out, "index": row["index"]}

    @staticmethod
    def _triple(token: int) -> tuple[float, int, str]:
        return (-0.5, token, "<eos>" if token == EOS else WORDS[token - 500])

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborts.append((rid, abort_all))

    async def flush_cache(self) -> FlushCacheReqOutput:
        self.busy = max(0, self.busy - 1)
        return FlushCacheReqOutput(id="", success=not self.busy, message=f"{self.busy} requests hold memory")

    async def get_internal_state(self, timeout: float) -> GetInternalStateReqOutput:
        return GetInternalStateReqOutput(id="", state={"waiting": 0})

    async def health_generate(self, timeout: float) -> str | None:
        return None if self.healthy else "engine"

    def response_sent(self, rid: str, status: int) -> None:
        self.sent.append((rid, status))


def _at(value: Any, number: int) -> Any:
    return value[number] if isinstance(value, list) else value


class Served:
    """An app under uvicorn in a thread."""

    def __init__(self, **options: Any) -> None:
        self.manager = options.pop("manager", None) or ScriptedManager()
        self.templates = PlainTemplates()
        self.sink = RingSink()
        self.status = options.pop("status", None) or ServerStatus(ServerState.UP)
        facts = ModelFacts(
            served_model_name=MODEL,
            model_path="/models/tiny",
            context_len=CONTEXT,
            vocab_size=VOCAB,
            version="0",
            eos_token_ids=(EOS,),
            default_sampling=options.pop("default_sampling", {}),
        )
        self.context = ServingContext(
            tokenizer_manager=self.manager,
            tokenizer=CharTokenizer(),
            templates=self.templates,
            facts=facts,
            trace=Tracer("http", self.sink),
            status=self.status,
            settings=Settings.build(api_key=options.get("keys", Keys()).api_key, page_size=1).public(),
            **options,
        )
        self.app = create_app(self.context)
        self.loop = loop_factory()()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.handle: ServerHandle = self.call(ServerHandle.start(self.app, http=self.context.http))
        self.http = httpx.Client(base_url=self.handle.url, timeout=10)

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def reset(self) -> None:
        """A fresh manager and default settings; what still ends is let end first."""
        self.call(asyncio.sleep(0.001))
        self.manager.__init__()  # type: ignore[misc]
        self.status.state, self.status.message = ServerState.UP, ""
        self.context.health_generation = True
        self.context.default_include_usage = self.context.enable_cache_report = False
        self.context.trace.on = True

    def close(self, grace: float = 0.0) -> None:
        self.http.close()
        self.call(self.handle.stop(grace))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.handle.url}/v1", api_key=key, max_retries=0)

    def ends(self, count: int) -> list[tuple[str, int]]:
        """The `(rid, status)` reported as ended; they are reported just after the client has its answer."""
        until(lambda: len(self.manager.sent) >= count)
        return list(self.manager.sent)

    @property
    def params(self) -> Any:
        """The sampling parameters of the latest request."""
        return self.manager.requests[-1].sampling_params


@contextmanager
def served(**options: Any) -> Iterator[Served]:
    server = Served(**options)
    try:
        yield server
    finally:
        server.close()


def chat(**fields: Any) -> dict[str, Any]:
    """A small chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def text(**fields: Any) -> dict[str, Any]:
    """A small completion body."""
    return {"model": MODEL, "prompt": "hi", **fields}


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Wait for `condition`, polling; says whether it came true."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return True
        pause.wait(0.005)
    return condition()


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked for its shape."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert isinstance(error["message"], str) and error["message"]
    return error


__all__ = [
    "CONTEXT", "EOS", "MODEL", "VOCAB", "WORDS", "ScriptedManager", "Served", "SgvizError", "chat",
    "error_of", "served", "text", "until",
]  # fmt: skip
