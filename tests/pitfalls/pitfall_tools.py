"""A served engine as its clients see it: the openai client, plain JSON, server-sent events, and its own account."""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import openai

from sgviz.engine import Engine
from sgviz.events.schema import Body

MODEL = "tiny-llama"
VOCAB = 312
PATIENCE_S = 20.0
TOLERANCE = 1e-4  # float32 sums in batches of other sizes
Json = dict[str, Any]


@dataclass
class Choice:
    """What a streamed choice amounted to; `deltas` are the pieces with text."""

    role: int = 0
    text: str = ""
    deltas: int = 0
    finish: str | None = None
    finishes: int = 0
    after_finish: int = 0


class Served:
    """An engine and its server."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine, self.url = engine, url
        self.http = httpx.Client(base_url=url, timeout=120)

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    # ---------------------------------------------------------------- asking

    def post(self, path: str, body: Json) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, text: str = "Say something.", **more: object) -> Any:
        messages = more.pop("messages", [{"role": "user", "content": text}])
        return self.client.chat.completions.create(model=MODEL, messages=messages, **more)

    def complete(self, prompt: object = "Once upon a time", **more: object) -> Any:
        return self.client.completions.create(model=MODEL, prompt=prompt, **more)

    def generate(self, prompt: str | list[int], *, params: Json | None = None, **more: object) -> Json:
        where = "text" if isinstance(prompt, str) else "input_ids"
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **(params or {})}
        answer = self.post("/generate", {where: prompt, "sampling_params": sampling, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Json) -> list[str]:
        """The data of every server-sent event of a streamed answer, as it was sent."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]

    def chunks(self, path: str, body: Json) -> list[Json]:
        """The same without the closing [DONE], which must be there once and last."""
        events = self.events(path, body)
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        return [json.loads(event) for event in events[:-1]]

    # ---------------------------------------------------------------- its own account

    def state(self) -> Json:
        return self.engine.internal_state()

    def events_of(self, *kinds: type[Body]) -> list[Any]:
        """The bodies of all events of these kinds so far, in the order of time."""
        return [event.body for event in self.engine.pipeline.ring.snapshot() if isinstance(event.body, kinds)]

    def until(self, **wanted: int) -> Json:
        """Wait until the account holds at least these numbers."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            state = self.state()
            if all(state[name] >= least for name, least in wanted.items()):
                return state
            assert time.monotonic() < deadline, (wanted, state)

    def until_idle(self, most_s: float = PATIENCE_S) -> Json:
        """Wait until no component knows of any request."""
        deadline = time.monotonic() + most_s
        while True:
            state = self.state()
            if not any(state[name] for name in LIVE):
                return state
            assert time.monotonic() < deadline, state

    def assert_empty(self) -> None:
        """Every component has forgotten every request, and all memory is free or can be freed."""
        state = self.until_idle()
        assert state["protected_tokens"] == state["private_tokens"] == 0, state
        assert state["available_tokens"] + state["evictable_tokens"] == state["max_total_num_tokens"], state
        assert state["free_rows"] == state["max_running_requests"], state


LIVE = ("num_live_reqs", "num_running_reqs", "num_waiting_reqs", "num_chunked_reqs",
        "num_detokenizer_reqs", "num_tokenizer_manager_reqs")  # fmt: skip


@contextmanager
def serving(model: str = MODEL, **settings: Any) -> Iterator[Served]:
    """An engine with these settings and a server on a free port."""
    with Engine(model, **{"torch_threads": 1, **settings}) as engine:
        served = Served(engine, engine.serve(port=0).url)
        try:
            yield served
        finally:
            served.http.close()


def folded(chunks: list[Json]) -> dict[int, Choice]:
    """The choices of a stream by index."""
    choices: dict[int, Choice] = defaultdict(Choice)
    for chunk in chunks:
        for part in chunk["choices"]:
            choice, delta = choices[part["index"]], part.get("delta", {})
            text = delta.get("content") or part.get("text") or ""
            choice.after_finish += choice.finishes and bool(text or part["finish_reason"])
            choice.role += "role" in delta
            choice.text += text
            choice.deltas += bool(text)
            choice.finishes += part["finish_reason"] is not None
            choice.finish = part["finish_reason"] or choice.finish
    return dict(choices)


def alike(one: Any, other: Any) -> bool:
    """Equal, but for the rounding of numbers: a cached prompt is computed in other pieces than a fresh one."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < TOLERANCE
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def opened(url: str, path: str, body: Json) -> socket.socket:
    """A connection on which the request was sent, and nothing read."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + payload)
    return connection
