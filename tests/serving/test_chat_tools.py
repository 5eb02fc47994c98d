"""Tools over HTTP: what the template and the engine get, chunk sequences, whole answers, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_answers import ARRAY, PING, TOOLS, TWO_CALLS, URL, WEATHER, calls_of, chunks, folded, serving, whole
from serving_tools import EOS, CharTokenizer, Served, chat, error_of

from sgviz.messages import SamplingParams
from sgviz.model.chat_template import ChatTemplate
from sgviz.serving.chat_plan import ChatPlanner
from sgviz.serving.protocol import ChatCompletionRequest, parse


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with serving(tool_call_parser="qwen25", reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    yield running
    running.reset()
    running.manager.text, running.manager.width = "", 3


def test_a_whole_answer_with_calls(server: Served) -> None:
    choice = whole(server, TWO_CALLS, tools=TOOLS)["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Let me look."
    assert calls_of(message) == [("get_weather", '{"city": "Paris"}'), ("ping", "{}")]
    ids = [call["id"] for call in message["tool_calls"]]
    assert all(len(each) == 29 and each.startswith("call_") for each in ids) and len(set(ids)) == 2
    assert all(int(each[5:], 16) >= 0 for each in ids)
    assert all(call["type"] == "function" for call in message["tool_calls"])


def test_content_is_null_where_there_are_only_calls(server: Served) -> None:
    text = TWO_CALLS.removeprefix("Let me look.\n")
    assert whole(server, text, tools=TOOLS)["choices"][0]["message"]["content"] is None
    assert all(
        "content" not in chunk["choices"][0]["delta"] for chunk in chunks(server, text, tools=TOOLS)[1:]
    )


def test_exact_chunks_of_a_call(server: Served) -> None:
    server.manager.width = 1000
    text = 'Ok <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    found = chunks(server, text, tools=TOOLS)
    choices = [chunk["choices"][0] for chunk in found]
    call_id = choices[2]["delta"]["tool_calls"][0]["id"]
    begun = {
        "index": 0,
        "id": call_id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Ok"},
        {"tool_calls": [begun]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["tool_calls"]
    assert choices[-1]["matched_stop"] == EOS


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 11, 1000])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_and_whole_are_equal(server: Served, width: int, n: int) -> None:
    server.manager.width = width
    text = "<think>\nHm, tools.\n</think>\n\n" + TWO_CALLS
    expected = whole(server, text, tools=TOOLS, n=n)
    found = chunks(server, text, tools=TOOLS, n=n, stream_options={"include_usage": True})
    assert found[-1]["usage"] == expected["usage"]
    ids = set()
    for index in range(n):
        mine = [chunk for chunk in found if chunk["choices"] and chunk["choices"][0]["index"] == index]
        message, reason = folded(mine)
        there = expected["choices"][index]
        assert reason == there["finish_reason"] == "tool_calls"
        assert message["content"] == there["message"]["content"] == "Let me look."
        assert message["reasoning_content"] == there["message"]["reasoning_content"] == "Hm, tools."
        assert calls_of(message) == calls_of(there["message"])
        ids |= {call["id"] for call in [*message["tool_calls"], *there["message"]["tool_calls"]]}
    assert len(ids) == 4 * n


@pytest.mark.parametrize("limit", range(0, len(TWO_CALLS), 9))
def test_an_answer_cut_off_anywhere_is_equal_in_both_ways(server: Served, limit: int) -> None:
    choice = whole(server, TWO_CALLS, tools=TOOLS, max_tokens=limit)["choices"][0]
    message, reason = folded(chunks(server, TWO_CALLS, tools=TOOLS, max_tokens=limit))
    assert reason == choice["finish_reason"] == "length"
    assert message["content"] == (choice["message"]["content"] or "")
    assert calls_of(message) == calls_of(choice["message"])


def test_one_call_only_without_parallel_tool_calls(server: Served) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    message = whole(server, TWO_CALLS, **fields)["choices"][0]["message"]
    assert calls_of(message) == calls_of(folded(chunks(server, TWO_CALLS, **fields))[0])
    assert [name for name, _ in calls_of(message)] == ["get_weather"]


def test_without_tools_or_with_choice_none_a_call_is_content(server: Served) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = whole(server, TWO_CALLS, **fields)["choices"][0]
        assert choice["message"]["content"] == TWO_CALLS and choice["message"]["tool_calls"] is None
        message, reason = folded(chunks(server, TWO_CALLS, **fields))
        assert (message["content"], message["tool_calls"], reason) == (TWO_CALLS, [], "stop")
        assert "tools" not in server.templates.options[-1]
        assert choice["finish_reason"] == "stop"


def test_the_template_is_given_the_tools(server: Served) -> None:
    whole(server, "hi", tools=TOOLS)
    assert server.templates.options[-1]["tools"] == TOOLS
    assert server.params.json_schema is None and server.params.skip_special_tokens is True


def test_strict_arguments_are_promised_only_where_a_grammar_holds_to_them(server: Served) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    whole(server, TWO_CALLS, tools=[PING, strict])
    tag = json.loads(server.params.structural_tag)["format"]
    assert tag["triggers"] == ["<tool_call>"] and tag["stop_after_first"] is False
    schemas = tag["tags"][0]["content"]["json_schema"]["$defs"]
    assert schemas == {"get_weather": WEATHER["function"]["parameters"], "ping": {"type": "object"}}
    whole(server, TWO_CALLS, tools=[strict], parallel_tool_calls=False)
    assert json.loads(server.params.structural_tag)["format"]["stop_after_first"] is True
    whole(server, "hi", tools=[strict], tool_choice="none")
    assert server.params.structural_tag is None
    with serving(tool_call_parser="pythonic") as other:
        refused = error_of(other.http.post(URL, json=chat(tools=[PING, strict])))
        assert refused["param"] == "tools[1].function.strict" and "hermes" in refused["message"]
    message = whole(server, ARRAY, tools=[strict, PING], tool_choice="required")["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "ping"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ("required", ["get_weather", "ping"], None),
        ({"type": "function", "function": {"name": "ping"}}, ["ping"], 1),
    ],
)
def test_demanded_calls_go_under_a_schema(
    server: Served, choice: Any, names: list[str], most: int | None, streamed: bool
) -> None:
    ask = chunks if streamed else whole
    ask(server, '[{"name": "ping", "parameters": {}}]', tools=TOOLS, tool_choice=choice)
    schema = json.loads(server.params.json_schema)
    assert schema["minItems"] == 1 and schema.get("maxItems") == most
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == names
    assert server.templates.options[-1]["tools"][1] == PING  # all of them, also when one is named


@pytest.mark.parametrize("width", [1, 4, 1000])
def test_the_array_of_demanded_calls_becomes_calls(server: Served, width: int) -> None:
    server.manager.width = width
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    choice = whole(server, ARRAY, **fields)["choices"][0]
    message, reason = folded(chunks(server, ARRAY, **fields))
    expected = [("get_weather", '{"city": "Paris"}'), ("ping", "{}")]
    assert calls_of(message) == calls_of(choice["message"]) == expected
    assert reason == choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None and message["content"] == ""
    assert choice["message"]["reasoning_content"] is None  # under a grammar nothing is thought


def test_calls_of_earlier_answers_come_to_the_template_with_their_arguments_as_objects(
    server: Served,
) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "call_1", "type": "function", "function": {"name": "ping", "arguments": arguments}}

    for given, seen in [('{"a": "ü"}', {"a": "ü"}), ("", {}), ({"a": 1}, {"a": 1}), ("{broken", "{broken")]:
        turns = [
            {"role": "assistant", "content": None, "tool_calls": [call(given)]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "pong"}]},
        ]
        whole(server, "ok", messages=turns, tools=TOOLS)
        assert server.templates.seen[-1] == [
            {"role": "assistant", "content": "", "tool_calls": [call(seen)]},
            {"role": "tool", "tool_call_id": "call_1", "content": "pong"},
        ]
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    shown = template.render([{"role": "assistant", "tool_calls": [call({"a": "ü"})]}], {})
    assert shown == '{"name": "ping", "arguments": {"a": "ü"}}'


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"tools": [PING, {"function": {"name": "a b"}}]}, "tools[1].function.name", "'a b'"),
    ({"tools": [{"function": {"name": "x" * 65}}]}, "tools[0].function.name", "64"),
    ({"tools": [PING, PING]}, "tools[1].function.name", "twice"),
    ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters", "object"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    ({"tool_choice": "requird", "tools": TOOLS}, "tool_choice", "did you mean 'required'"),
    ({"tool_choice": 5, "tools": TOOLS}, "tool_choice", "expected"),
    ({"tool_choice": {"type": "function", "function": {"name": "pin"}}, "tools": TOOLS}, "tool_choice", "did you mean"),
    ({"tool_choice": {"type": "function", "function": {"name": "ping"}}}, "tool_choice", "there are none"),
    ({"tool_choice": {"type": "custom", "function": {"name": "ping"}}, "tools": TOOLS}, "tool_choice.type", "custom"),
    ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
     "tool_choice", "combined"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "messages[0].tool_calls[0].function.name", "required"),
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_cannot_be_is_refused_before_the_stream(
    server: Served, fields: dict[str, Any], param: str, words: str, streamed: bool
) -> None:
    error = error_of(server.http.post(URL, json=chat(**fields, stream=streamed)))
    assert error["code"] == 400 and error["param"] == param and words in error["message"]
    assert server.manager.requests == []


def test_a_schema_nested_without_end_is_refused(server: Served) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = error_of(server.http.post(URL, json=chat(tools=[tool], tool_choice="required")))
    assert error["code"] == 400 and error["param"] == "tools[0].function.parameters"


def test_schemas_too_large_for_a_grammar_are_refused(server: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 300_000]}}}
    error = error_of(server.http.post(URL, json=chat(tools=[tool], tool_choice="required")))
    assert error["code"] == 400 and error["param"] == "tools" and "at most" in error["message"]


def test_without_a_parser_tools_that_may_be_called_are_refused() -> None:
    with serving() as plain:
        error = error_of(plain.http.post(URL, json=chat(tools=TOOLS)))
        assert error["code"] == 400 and error["param"] == "tools" and "--tool-call-parser" in error["message"]
        whole(plain, "hi", tools=TOOLS, tool_choice="none")
        message = whole(plain, ARRAY, tools=TOOLS, tool_choice="required")["choices"][0]["message"]
        assert len(message["tool_calls"]) == 2
        assert whole(plain, "<think>a</think>b")["choices"][0]["message"] == {
            "role": "assistant",
            "content": "<think>a</think>b",
            "reasoning_content": None,
            "tool_calls": None,
        }


class MarkerTokenizer(CharTokenizer):
    """`<tool_call>` is one special token, which is left out of texts unless they say otherwise."""

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]:
        return [7] if text == "<tool_call>" else super().encode(text, add_special_tokens)

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str:
        texts = ["<tool_call>" * (not skip_special_tokens) if token == 7 else chr(token) for token in ids]
        return "".join(texts)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "skip_special_tokens": True}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, False),
        ({}, False),
    ],
)
def test_special_tokens_stay_in_the_text_where_the_format_needs_them(
    fields: dict[str, Any], kept: bool
) -> None:
    planner = ChatPlanner(MarkerTokenizer(), "hermes", None)
    request = parse(ChatCompletionRequest, chat(**fields))
    assert planner.sampling(request, SamplingParams()).skip_special_tokens is not kept
