"""Function calling and reasoning through the served pipeline, with the openai client and a model that insists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from forced_model import ASK, CHAT, Forced, forced_model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}},
]
NAMED: Any = {"type": "function", "function": {"name": "ping"}}
ARGUMENTS = '{"city": "Paris, \\"the\\" {city} of light ☀"}'
CALLS = (
    "<think>\nThe weather is asked for.\n</think>\n\nOne moment.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module", params=["normal", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Forced]:
    with forced_model(
        event_loop=request.param, tool_call_parser="qwen25", reasoning_parser="qwen3"
    ) as forced:
        yield forced


@pytest.fixture
def forced(engine: Forced) -> Iterator[Forced]:
    yield engine
    engine.served.assert_empty()


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


EXPECTED = [("get_weather", ARGUMENTS), ("ping", "{}")]


def test_calls_thoughts_and_content_by_the_openai_client(forced: Forced) -> None:
    forced.says(CALLS)
    choice = forced.create(**ASK, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and calls_of(choice.message) == EXPECTED
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "The weather is asked for."
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"].endswith("☀")
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)


@pytest.mark.parametrize("interval", [1, 3, 1000])
def test_the_streaming_helper_puts_the_same_answer_together(forced: Forced, interval: int) -> None:
    forced.says(CALLS)
    kinds = []
    with forced.served.client.chat.completions.stream(
        **ASK, tools=TOOLS, extra_body={"stream_interval": interval}
    ) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls" and calls_of(choice.message) == EXPECTED
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "The weather is asked for."
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") >= (2 if interval > 3 else 5)


def test_a_conversation_with_calls_and_their_results_goes_on(forced: Forced) -> None:
    forced.says(CALLS)
    first = forced.create(**ASK, tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"} for call in first.tool_calls
    ]
    forced.says("It is 18 degrees.")
    turns = [*ASK["messages"], first.model_dump(exclude_none=True), *results]
    choice = forced.create(**{**ASK, "messages": turns}, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It is 18 degrees.", "stop")
    assert choice.message.tool_calls is None


def in_both_ways(forced: Forced, **fields: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish_reason of an answer, which must be the same streamed and not."""
    whole = forced.create(**ASK, **fields).choices[0]
    content, reason, calls = "", "", []
    for chunk in forced.create(**ASK, **fields, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name:
                calls.append((call.function.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + call.function.arguments)
        reason = choice.finish_reason or reason
    assert (content, calls, reason) == (
        whole.message.content or "",
        calls_of(whole.message),
        whole.finish_reason,
    )
    return content, calls, reason


@pytest.mark.parametrize(("choice", "names"), [("required", ["get_weather", "ping"]), (NAMED, ["ping"])])
@pytest.mark.parametrize("willing", [True, False])
def test_tool_choice_required_and_named_are_obeyed(
    forced: Forced, choice: Any, names: list[str], willing: bool
) -> None:
    """Calls of those functions and no content, whether or not the model would; finish_reason and tool_calls agree,
    streamed and not. vllm-project/vllm#9209, vllm-project/vllm#53363, vllm-project/vllm#21052,
    vllm-project/vllm#40399, lablup/mlxcel#1581, InternLM/lmdeploy#3412
    """
    ping = '{"name": "ping", "parameters": {"x": [1, "two"]}}'
    both = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {ping}]'
    forced.says(CALLS if not willing else both if choice == "required" else f"[{ping}]")
    content, calls, reason = in_both_ways(forced, tools=TOOLS, tool_choice=choice, max_tokens=400)
    assert content == "" and {name for name, _ in calls} <= set(names) and calls
    if willing:
        assert [name for name, _ in calls] == names and reason == "tool_calls"
        assert json.loads(calls[-1][1]) == {"x": [1, "two"]}
    else:  # the device takes what the grammar allows, and seldom comes to an end
        assert reason in ("tool_calls", "length")


def test_tool_choice_none_is_obeyed(forced: Forced) -> None:
    """No call, not even of a text that is one. vllm-project/vllm#9209, vllm-project/vllm#53363"""
    forced.says(CALLS)
    content, calls, reason = in_both_ways(forced, tools=TOOLS, tool_choice="none")
    assert calls == [] and reason == "stop" and "<tool_call>" in content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": NAMED},
        {"tool_choice": {"type": "function", "function": {"name": "nobody"}}, "tools": TOOLS},
        {"tool_choice": "always", "tools": TOOLS},
    ],
)
def test_a_choice_that_cannot_be_met_is_400_before_the_stream(
    forced: Forced, fields: dict[str, Any], stream: bool
) -> None:
    """No such function, no functions, no such choice. vllm-project/vllm#9209, InternLM/lmdeploy#3412"""
    with pytest.raises(openai.BadRequestError) as raised:
        forced.create(**ASK, **fields, stream=stream)
    assert raised.value.param == "tool_choice"


def test_null_content_beside_calls_is_the_prompt_of_empty_content(forced: Forced) -> None:
    """Nothing dropped, no "None" in the prompt. vllm-project/vllm#9358, PrimeIntellect-ai/renderers#134"""
    forced.says("ok")
    call = [{"id": "call_1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}]
    sizes = set()
    for content in ({}, {"content": None}, {"content": ""}, {"content": [{"type": "text", "text": ""}]}):
        turns = [*ASK["messages"], {"role": "assistant", **content, "tool_calls": call}]
        turns.append({"role": "tool", "tool_call_id": "call_1", "content": "pong"})
        sizes.add(forced.post(messages=turns)["usage"]["prompt_tokens"])
    assert len(sizes) == 1


def test_a_marker_begun_and_never_completed_is_delivered(forced: Forced) -> None:
    """What was withheld as the beginning of a marker still comes, streamed and not. sgl-project/sglang#11462"""
    for text in (
        "one <tool_call",
        "two <tool",
        "three <",
        "<thi",
        "<think>four</thin",
        '<tool_call>\n{"name": "pi',
    ):
        forced.says(text)
        whole = forced.post(tools=TOOLS)["choices"][0]
        content = whole["message"]["content"] + (whole["message"]["reasoning_content"] or "")
        assert content == text.removeprefix("<think>") and whole["finish_reason"] == "stop"
        deltas = forced.served.chunks(CHAT, {**ASK, "tools": TOOLS})
        parts = [chunk["choices"][0]["delta"] for chunk in deltas]
        streamed = "".join(
            (part.get("content") or "") + (part.get("reasoning_content") or "") for part in parts
        )
        assert streamed == content


def test_one_role_one_finish_and_one_done_with_calls(forced: Forced) -> None:
    """sgl-project/sglang#8417, ollama/ollama#7626, ModelTC/LightLLM#1262, ai-dynamo/dynamo#12741"""
    forced.says(CALLS)
    chunks = forced.served.chunks(CHAT, {**ASK, "tools": TOOLS, "n": 2})
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [("role" in choice["delta"]) for choice in mine] == [True] + [False] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["tool_calls"]
        assert mine[-1]["delta"] == {}


def test_usage_is_equal_in_both_ways_and_counts_thoughts_once(forced: Forced) -> None:
    """sgl-project/sglang#954, BerriAI/litellm#28735, ROCm/ATOM#1711"""
    forced.says(CALLS)
    whole = forced.post(tools=TOOLS, n=2)["usage"]
    chunks = forced.served.chunks(
        CHAT, {**ASK, "tools": TOOLS, "n": 2, "stream_options": {"include_usage": True}}
    )
    assert chunks[-1]["usage"] == whole and chunks[-1]["choices"] == []
    codec = forced.served.engine.pipeline.tokenizer
    ids = codec.encode(CALLS, add_special_tokens=False)
    thought = next(k for k in range(len(ids)) if "</think>" in codec.decode(ids[:k]))
    assert whole["reasoning_tokens"] == whole["completion_tokens_details"]["reasoning_tokens"] == 2 * thought


# ---------------------------------------------------------------- strict tools, and thoughts under a grammar


CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def strict_tools() -> list[Any]:
    weather = {**TOOLS[0]["function"], "parameters": CITIES, "strict": True}
    return [{"type": "function", "function": weather}, TOOLS[1]]


def test_calls_of_strict_tools_follow_their_schema_whatever_the_model_wants(forced: Forced) -> None:
    """Thoughts before and text around are free, as without strict; what is not strict takes any object."""
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    right, free = call.format("get_weather", '{"city": "Rome"}'), call.format("ping", '{"any": [1]}')
    forced.says(f"<think>\nHm {{}} 1 < 2.\n</think>\n\nLook: {right}\n{free}")
    content, calls, reason = in_both_ways(forced, tools=strict_tools())
    assert (content, reason) == ("Look:", "tool_calls")
    assert calls == [("get_weather", '{"city": "Rome"}'), ("ping", '{"any": [1]}')]
    for arguments in ('{"city": "Oslo"}', '{"town": 1}', "[]", "{}"):
        forced.says(f"Look: {call.format('get_weather', arguments)}")
        _, calls, reason = in_both_ways(forced, tools=strict_tools(), max_tokens=200)
        (name, got) = calls[0]
        assert name == "get_weather" and reason in ("tool_calls", "length")
        assert reason == "length" or json.loads(got)["city"] in CITIES["properties"]["city"]["enum"]
    forced.says("No call at all.")
    assert in_both_ways(forced, tools=strict_tools()) == ("No call at all.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_strict_tools_beside_another_form_of_the_output_are_400(forced: Forced, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be combined") as raised:
        forced.create(**ASK, tools=strict_tools(), response_format={"type": "json_object"}, stream=stream)
    assert raised.value.param == "tools"


def test_a_strict_schema_that_cannot_be_compiled_is_told_of_tools(forced: Forced) -> None:
    broken = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": broken, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        forced.create(**ASK, tools=tools)


THOUGHTS = '<think>\nSo {"not": JSON} 1 < 2.\n</think>\n\n'


@pytest.mark.parametrize("thinks", [True, False])
def test_a_form_of_the_output_holds_behind_the_thoughts(forced: Forced, thinks: bool) -> None:
    forced.says(THOUGHTS * thinks + '{"city": "Rome"}')
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITIES, "strict": True}}
    message = forced.create(**ASK, response_format=form).choices[0].message
    assert json.loads(message.content) == {"city": "Rome"}
    assert message.reasoning_content == ('So {"not": JSON} 1 < 2.' if thinks else None)
    content, _, reason = in_both_ways(forced, response_format=form)
    assert (content, reason) == ('{"city": "Rome"}', "stop")
    forced.says(THOUGHTS + "No digits at all, but text.")
    content, _, reason = in_both_ways(forced, extra_body={"regex": "[0-9]{3}"})
    assert reason == "stop" and len(content) == 3 and content.isdigit()


def test_a_prompt_that_closes_or_opens_thoughts_settles_where_the_grammar_begins(forced: Forced) -> None:
    forced.says("a thought</think>12")
    for begun, thought in (("<think>", "a thought"), ("<think>So</think>", None)):
        turns = [*ASK["messages"], {"role": "assistant", "content": begun}]
        answer = forced.post(messages=turns, continue_final_message=True, regex="[0-9]{2}")
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == thought and message["content"].isdigit()


def test_a_demanded_call_comes_behind_the_thoughts(forced: Forced) -> None:
    forced.says(THOUGHTS + '[{"name": "ping", "parameters": {"x": 1}}]')
    choice = forced.create(**ASK, tools=TOOLS, tool_choice=NAMED).choices[0]
    assert calls_of(choice.message) == [("ping", '{"x": 1}')] and choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content is not None


def test_generate_has_require_reasoning_by_name(forced: Forced) -> None:
    forced.says("free text</think>\n\n42")
    body = {
        "text": "hi",
        "sampling_params": {"regex": "[0-9]{2}", "max_new_tokens": 64},
        "require_reasoning": True,
    }
    answer = forced.served.post("/generate", body).json()
    assert (
        answer["text"] == "free text</think>\n\n42" and answer["meta_info"]["finish_reason"]["type"] == "stop"
    )
    answer = forced.served.post("/generate", {**body, "require_reasoning": False}).json()
    assert answer["text"].isdigit()


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_format_that_begins_with_thoughts_has_its_grammar_behind_them(loop: str) -> None:
    """deepseek-r1: no marker opens the thoughts, and an answer without them is all thought, never free text."""
    with forced_model(
        event_loop=loop, tool_call_parser="deepseekv3", reasoning_parser="deepseek-r1"
    ) as model:
        model.says("Weighing it.\n</think>\n\n42")
        assert in_both_ways(model, extra_body={"regex": "[0-9]{2}"}) == ("42", [], "stop")
        call = "function<｜tool▁sep｜>get_weather\n```json\n{}\n```"
        model.says(
            "Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
            + call.format('{"city": "Rome"}')
            + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
        content, calls, reason = in_both_ways(model, tools=strict_tools())
        assert (content, calls, reason) == ("", [("get_weather", '{"city": "Rome"}')], "tool_calls")
        model.says("Only thoughts that go on and on")
        content, _, reason = in_both_ways(model, extra_body={"regex": "[0-9]{2}"}, max_tokens=40)
        assert (content, reason) == ("", "length")  # an end token is none of the thoughts
