"""Random traffic of all kinds on one server, each answer checked: what a long test runs for minutes.

A kind is a function of a `Client` that asks one thing and checks what came. `KINDS` has how often each comes; kinds of
features that the server does not have are left out by `available`, with a word.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

WORDS = (
    "the",
    "of",
    "and",
    "river",
    "stone",
    "light",
    "under",
    "with",
    "for",
    "blue",
    "seven",
    "lamp",
    "until",
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
BAD = (
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}),
    ("/generate", {"input_ids": [10**6]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "regex": "[z-a]"}),
)
ENDS = {"stop", "length", "tool_calls"}


class Client:
    """One of several that ask at the same time; `random` decides what."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = urlsplit(url)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.number = seed

    async def send(self, path: str, body: Any, *, leave_after: int | None = None) -> tuple[int, bytes]:
        """Status and body of one POST; with `leave_after`, hang up when so many bytes of the body have come."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        head = [
            f"POST {path} HTTP/1.1", f"Host: {self.url.netloc}", "Content-Type: application/json",
            f"Content-Length: {len(data)}", "Connection: close", "", "",
        ]  # fmt: skip
        writer.write("\r\n".join(head).encode() + data)
        try:
            status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
            raw = b""
            while (leave_after is None or len(raw) < leave_after) and (piece := await reader.read(1 << 16)):
                raw += piece
            return status, raw
        finally:
            writer.close()

    async def ask(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        """The JSON of an answer that is not streamed."""
        got, raw = await self.send(path, body)
        assert got == status, f"{path} {body}: {got} {raw[:500]!r}"
        return json.loads(raw) if raw else None

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer, checked for its end."""
        got, raw = await self.send(path, {**body, "stream": True})
        assert got == 200, f"{path} {body}: {got} {raw[:500]!r}"
        events = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1, events[-2:]
        found = [json.loads(event) for event in events[:-1]]
        assert not any("error" in event for event in found), found[-1]
        return found

    def text(self, most: int = 40) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, most)))

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text()}]

    def sampling(self, most: int = 24) -> dict[str, Any]:
        """Fields that chat and completions share."""
        chosen: dict[str, Any] = {
            "max_tokens": self.random.randint(1, most),
            "temperature": self.random.choice((0, 0.8)),
        }
        if self.random.random() < 0.3:
            chosen |= self.random.choice((
                {"top_p": 0.8}, {"frequency_penalty": 0.5}, {"logit_bias": {"65": 2}}, {"stop": ["e", "th"]},
                {"seed": 7}, {"ignore_eos": True}, {"min_p": 0.05},
            ))  # fmt: skip
        return chosen

    def rid(self) -> str:
        self.number += 1000
        return f"soak-{self.number}"


async def chat(client: Client) -> None:
    body = {"messages": client.messages(), **client.sampling()}
    if client.random.random() < 0.5:
        chunks = await client.stream(
            "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] <= body["max_tokens"]
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] in ENDS
        return
    answer = await client.ask("/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] in ENDS
    assert answer["usage"]["completion_tokens"] <= body["max_tokens"]


async def completions(client: Client) -> None:
    prompts = [client.text() for _ in range(client.random.randint(1, 3))]
    body = {"prompt": prompts, "n": client.random.randint(1, 2), "logprobs": 2, **client.sampling()}
    answer = await client.ask("/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts) * body["n"]))
    assert all(choice["finish_reason"] in ENDS for choice in answer["choices"])


async def generate(client: Client) -> None:
    ids = [client.random.randint(16, 300) for _ in range(client.random.randint(1, 200))]
    params = {"max_new_tokens": client.random.randint(0, 30), "temperature": 0, "ignore_eos": True}
    events = await client.stream(
        "/generate", {"input_ids": ids, "sampling_params": params, "rid": client.rid()}
    )
    assert len(events[-1]["output_ids"]) == params["max_new_tokens"]
    assert events[-1]["meta_info"]["prompt_tokens"] == len(ids)


async def grammar(client: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": SCHEMA}}
    body = {"messages": client.messages(), "max_tokens": 120, "temperature": client.random.choice((0, 1))}
    answer = await client.ask("/v1/chat/completions", {**body, "response_format": form})
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"n", "s"} and found["s"] in ("a", "b")


async def tools(client: Client) -> None:
    body = {"messages": client.messages(), "tools": [TOOL], "max_tokens": 120, "temperature": 0}
    body["tool_choice"] = client.random.choice(("auto", "required", "none"))
    answer = await client.ask("/v1/chat/completions", body)
    calls = answer["choices"][0]["message"].get("tool_calls")
    if body["tool_choice"] == "none":
        assert not calls
    for call in calls or ():
        assert call["function"]["name"] == "look"


async def hang_up(client: Client) -> None:
    body = {"messages": client.messages(), "max_tokens": 400, "ignore_eos": True, "stream": True}
    status, _ = await client.send("/v1/chat/completions", body, leave_after=client.random.randint(1, 3000))
    assert status == 200


async def abort(client: Client) -> None:
    rid, params = client.rid(), {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    task = asyncio.create_task(
        client.ask("/generate", {"text": client.text(), "rid": rid, "sampling_params": params})
    )
    await asyncio.sleep(client.random.uniform(0.0, 0.3))
    status, raw = await client.send("/abort_request", {"rid": rid})
    assert status == 200, raw
    reason = (await task)["meta_info"]["finish_reason"]["type"]
    assert reason in ("abort", "length")


async def bad(client: Client) -> None:
    path, body = client.random.choice(BAD)
    status, raw = await client.send(path, body)
    assert status == 400 and json.loads(raw)["error"]["code"] == 400, raw


async def flush(client: Client) -> None:
    """Refused while others run, which is most of the time."""
    status, _ = await client.send("/flush_cache", {})
    assert status in (200, 400)


async def session(client: Client) -> None:
    name = await client.ask("/open_session", {"capacity_of_str_len": 4000})
    before = None
    for _ in range(client.random.randint(1, 4)):
        params = {"max_new_tokens": client.random.randint(1, 12), "temperature": 0, "ignore_eos": True}
        turn = {"id": name, "rid": before}
        body = {"input_ids": [client.random.randint(16, 300) for _ in range(6)], "sampling_params": params}
        answer = await client.ask("/generate", {**body, "session_params": turn})
        assert answer["meta_info"]["completion_tokens"] == params["max_new_tokens"]
        before = answer["meta_info"]["id"]
    status, raw = await client.send("/close_session", {"session_id": name})
    assert status == 200, raw


async def embeddings(client: Client) -> None:
    texts = [client.text() for _ in range(client.random.randint(1, 4))]
    answer = await client.ask("/v1/embeddings", {"model": "tiny-llama", "input": texts})
    assert [one["index"] for one in answer["data"]] == list(range(len(texts)))
    for one in answer["data"]:
        assert abs(sum(value * value for value in one["embedding"]) - 1) < 1e-3


Kind = Callable[[Client], Awaitable[None]]
KINDS: tuple[tuple[int, Kind], ...] = (
    (6, chat), (4, completions), (4, generate), (2, grammar), (2, tools), (2, hang_up), (2, abort), (1, bad),
    (1, flush), (2, session), (2, embeddings),
)  # fmt: skip
OPTIONAL: dict[Kind, tuple[str, dict[str, Any]]] = {
    session: ("/open_session", {"capacity_of_str_len": 10}),
    embeddings: ("/v1/embeddings", {"model": "tiny-llama", "input": "a"}),
}


async def available(client: Client) -> list[tuple[int, Kind]]:
    """`KINDS` without what this server does not have, which is said."""
    missing = set()
    for kind, (path, body) in OPTIONAL.items():
        status, _ = await client.send(path, body)
        if status != 200:
            missing.add(kind)
            print(f"left out: {kind.__name__}, as {path} answers {status}")
    return [(weight, kind) for weight, kind in KINDS if kind not in missing]


async def drive(client: Client, kinds: list[tuple[int, Kind]], until: float) -> None:
    """One request after the other until the loop's clock says `until`; the first that goes wrong is raised."""
    loop = asyncio.get_running_loop()
    weights = [weight for weight, _ in kinds]
    while loop.time() < until:
        ((_, kind),) = client.random.choices(kinds, weights)
        await kind(client)
        client.counts[kind.__name__] += 1
