"""Function calling and reasoning through the served pipeline, with the openai client.

A small model cannot be relied on to call functions, so the mock device plays the ids of a given text; everything
else, from the template to the socket, is what a user has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pitfall_tools import MODEL, Served, serving

from sgviz.config import Settings
from sgviz.worker import factory
from sgviz.worker.factory import mock_info_of
from sgviz.worker.mock_worker import MockWorker
from sgviz.worker.protocol import Worker

CHAT = "/v1/chat/completions"
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
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Paris?"}]}


class Forced:
    """A served engine whose model writes `text`, whatever it is asked."""

    def __init__(self, served: Served, script: list[int]) -> None:
        self.served, self._script = served, script

    def says(self, text: str) -> None:
        self._script[:] = self.served.engine.pipeline.tokenizer.encode(text, add_special_tokens=False)

    def post(self, **fields: Any) -> Any:
        answer = self.served.post(CHAT, {**ASK, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def create(self) -> Any:
        return self.served.client.chat.completions.create


@pytest.fixture(scope="module", params=["normal", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Forced]:
    script: list[int] = []

    def make_worker(settings: Settings) -> Worker:
        info = mock_info_of(settings)
        return MockWorker(
            info, rule=lambda rid, index, _: script[index] if index < len(script) else info.eos_token_ids[0]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "make_worker", make_worker)
        formats = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
        with serving(event_loop=request.param, device="mock", max_total_tokens=8192, **formats) as served:
            yield Forced(served, script)


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
