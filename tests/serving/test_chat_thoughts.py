"""Thoughts over HTTP, what events and logprobs show of answers in parts, and finished texts taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chat_answers import TOOLS, TWO_CALLS, chunks, folded, serving, whole
from serving_tools import Served, error_of
from test_serving_events import bodies

from sgviz.events.schema import ChunkSent


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with serving(tool_call_parser="qwen25", reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    yield running
    running.reset()
    running.manager.text, running.manager.width = "", 3


THOUGHT = "<think>\nLet me see.\n</think>\n\nForty-two."
TOKENS = len("<think>\nLet me see.\n</think>")


@pytest.mark.parametrize("width", [1, 4, 1000])
def test_thoughts_are_told_from_the_answer(server: Served, width: int) -> None:
    server.manager.width = width
    body = whole(server, THOUGHT)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Forty-two.")
    assert body["usage"]["reasoning_tokens"] == TOKENS
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": TOKENS}
    found = chunks(server, THOUGHT, stream_options={"include_usage": True})
    assert found[-1]["usage"] == body["usage"]
    there, reason = folded(found)
    assert (there["reasoning_content"], there["content"], reason) == ("Let me see.", "Forty-two.", "stop")
    kinds = [next(iter(chunk["choices"][0]["delta"]), "") for chunk in found[:-1]]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "content", ""].index)


def test_the_switches_of_thoughts(server: Served) -> None:
    message = whole(server, THOUGHT, separate_reasoning=False)["choices"][0]["message"]
    assert message["content"] == THOUGHT and message["reasoning_content"] is None
    assert folded(chunks(server, THOUGHT, separate_reasoning=False))[0]["content"] == THOUGHT
    found = chunks(server, THOUGHT, stream_reasoning=False)
    pieces = [chunk["choices"][0]["delta"].get("reasoning_content") for chunk in found]
    assert [piece for piece in pieces if piece] == ["Let me see."]


def test_cut_off_while_thinking_all_is_thought(server: Served) -> None:
    body = whole(server, THOUGHT, max_tokens=15)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length" and body["usage"]["reasoning_tokens"] == 15
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Let me ", "")
    there, reason = folded(chunks(server, THOUGHT, max_tokens=15))
    assert (there["reasoning_content"], there["content"], reason) == ("Let me ", "", "length")


def test_without_thoughts_none_are_counted(server: Served) -> None:
    usage = whole(server, "Yes.")["usage"]
    assert usage["reasoning_tokens"] == 0 and usage["completion_tokens_details"] is None


def test_a_prompt_that_opens_thoughts_begins_the_answer_inside(server: Served) -> None:
    prefill = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>So far"}]
    fields: dict[str, Any] = {"messages": prefill, "continue_final_message": True}
    message = whole(server, " good.</think>Yes.", **fields)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("good.", "Yes.")
    prefill[1]["content"] += "</think>"
    message = whole(server, "Yes.", **fields)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Yes.")
    # thoughts are off: the prompt has them closed already, where this format begins inside
    with serving(reasoning_parser="deepseek-r1") as thinker:
        message = whole(thinker, "a</think>b")["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("a", "b")
        fields["messages"] = [prefill[0], {"role": "assistant", "content": "<think>\n</think>\n"}]
        message = whole(thinker, "Yes.", **fields)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (None, "Yes.")


# ---------------------------------------------------------------- logprobs, events, finished texts


def test_every_token_has_its_logprob_whatever_becomes_of_its_text(server: Served) -> None:
    expected = whole(server, TWO_CALLS, tools=TOOLS, logprobs=True)["choices"][0]["logprobs"]["content"]
    found = chunks(server, TWO_CALLS, tools=TOOLS, logprobs=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in found]
    assert [entry for part in parts if part for entry in part["content"]] == expected
    assert len(expected) == len(TWO_CALLS) + 1
    assert folded(found)[0]["content"] == "Let me look."


def test_events_name_the_parts(server: Served) -> None:
    text = "<think>Hm</think>" + TWO_CALLS
    chunks(server, text, tools=TOOLS, rid="parts")
    sent = [body for body in bodies(server, "parts") if isinstance(body, ChunkSent)]
    parts = [body.part for body in sent]
    assert list(dict.fromkeys(parts)) == ["role", "reasoning", "delta", "tool_call", "finish", "done"]
    size = {part: sum(body.chars for body in sent if body.part == part) for part in parts}
    assert (size["reasoning"], size["delta"]) == (len("Hm"), len("Let me look."))
    assert size["tool_call"] == len("get_weatherping" + '{"city": "Paris"}' + "{}")


def test_a_finished_text_can_be_taken_apart(server: Served) -> None:
    body: dict[str, Any] = {"text": TWO_CALLS, "tools": TOOLS}
    expected = {
        "normal_text": "Let me look.",
        "calls": [
            {"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Paris"}'},
            {"tool_index": 1, "name": "ping", "parameters": "{}"},
        ],
    }
    assert server.http.post("/parse_function_call", json=body).json() == expected
    named = {**body, "text": "[TOOL_CALLS]ping{}", "tool_call_parser": "mistral"}
    assert server.http.post("/parse_function_call", json=named).json()["calls"][0]["name"] == "ping"
    thought = {"text": THOUGHT}
    expected = {"reasoning_text": "Let me see.", "text": "Forty-two."}
    assert server.http.post("/separate_reasoning", json=thought).json() == expected
    other = {"text": "a</think>b", "reasoning_parser": "deepseek-r1"}
    assert server.http.post("/separate_reasoning", json=other).json() == {"reasoning_text": "a", "text": "b"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/parse_function_call", {"text": "a"}, "tools"),
        ("/parse_function_call", {"tools": []}, "text"),
        ("/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "qwen9"}, "tool_call_parser"),
        ("/separate_reasoning", {"text": 5}, "text"),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "r9"}, "reasoning_parser"),
    ],
)
def test_what_cannot_be_taken_apart(server: Served, path: str, body: dict[str, Any], param: str) -> None:
    error = error_of(server.http.post(path, json=body))
    assert error["code"] == 400 and error["param"] == param


def test_without_a_server_s_format_one_must_be_named() -> None:
    with serving() as plain:
        for path, name in (
            ("/parse_function_call", "tool_call_parser"),
            ("/separate_reasoning", "reasoning_parser"),
        ):
            error = error_of(plain.http.post(path, json={"text": "a", "tools": []}))
            assert error["code"] == 400 and error["param"] == name
