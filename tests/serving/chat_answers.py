"""A server whose model writes a given text, and chat answers of it as clients see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serving_tools import EOS, ScriptedManager, Served, chat, served

from sgviz.messages import SamplingParams

URL = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
TWO_CALLS = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)
ARRAY = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "ping", "parameters": {}}]'


class TextManager(ScriptedManager):
    """Answers with `text`, one character a token, `width` characters a step; the last token is the end."""

    text = ""
    width = 3

    def _steps(
        self, params: SamplingParams, index: int
    ) -> list[tuple[str, list[int], dict[str, Any] | None]]:
        ids = [ord(char) for char in self.text] + [EOS]
        reason: dict[str, Any] = {"type": "stop", "matched": EOS}
        if params.max_new_tokens is not None and params.max_new_tokens < len(ids):
            ids, reason = ids[: params.max_new_tokens], {"type": "length", "length": params.max_new_tokens}
        ends = [*range(self.width, len(ids), self.width), len(ids)]
        return [(self.text[:end], ids[:end], reason if end == len(ids) else None) for end in ends]

    @staticmethod
    def _triple(token: int) -> tuple[float, int, str]:
        return (-0.5, token, chr(token))


@contextmanager
def serving(**options: Any) -> Iterator[Served]:
    with served(manager=TextManager(), **options) as server:
        yield server


def whole(server: Served, text: str, **fields: Any) -> dict[str, Any]:
    server.manager.text = text
    response = server.http.post(URL, json=chat(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def chunks(server: Served, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The decoded chunks without [DONE]."""
    server.manager.text = text
    response = server.http.post(URL, json=chat(stream=True, **fields))
    assert response.status_code == 200, response.text
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def folded(found: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that a client puts together, and the finish_reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for chunk in found:
        for choice in chunk["choices"]:
            assert not reasons
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                    message["tool_calls"].append({**call["function"], "id": call["id"]})
                else:
                    assert call["index"] == len(message["tool_calls"]) - 1
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, reasons[0]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [call.get("function", call) for call in message["tool_calls"] or []]
    return [(call["name"], call["arguments"]) for call in calls]
