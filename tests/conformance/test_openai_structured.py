"""Structured outputs and tools through the client's own helpers, with a model that writes a given text."""

from __future__ import annotations

import enum
import json
from typing import Any

import openai
import pytest
from forced_model import ASK, Forced
from pydantic import BaseModel


class Unit(enum.StrEnum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(BaseModel):
    city: str
    district: str | None


class Weather(BaseModel):
    """The weather somewhere."""

    place: Place
    unit: Unit
    days: list[int]


TEXT = '{"place": {"city": "Köln ☀", "district": null}, "unit": "celsius", "days": [1, 2]}'
EXPECTED = Weather(place=Place(city="Köln ☀", district=None), unit=Unit.CELSIUS, days=[1, 2])
TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")
CALL = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'


def chat(forced: Forced) -> Any:
    return forced.served.client.chat.completions


def test_parse_gives_the_pydantic_model(forced: Forced) -> None:
    forced.says(TEXT)
    message = chat(forced).parse(**ASK, response_format=Weather).choices[0].message
    assert message.parsed == EXPECTED and message.refusal is None


def test_parse_raises_where_a_model_that_would_rather_write_another_never_ends(forced: Forced) -> None:
    forced.says('{"place": {"town": 5, "city": "x", "district": "y"}, "unit": "celsius", "days": []}')
    with pytest.raises(openai.LengthFinishReasonError):  # this one goes astray and never ends
        chat(forced).parse(**ASK, response_format=Weather, max_tokens=60)


def test_parse_behind_thoughts(forced: Forced) -> None:
    forced.says(f"<think>\nWhich unit?\n</think>\n\n{TEXT}")
    message = chat(forced).parse(**ASK, response_format=Weather).choices[0].message
    assert message.parsed == EXPECTED and message.reasoning_content == "Which unit?"


def test_the_streaming_helper_parses_as_it_goes(forced: Forced) -> None:
    forced.says(TEXT)
    parsed = []
    with chat(forced).stream(**ASK, response_format=Weather) as stream:
        for event in stream:
            if event.type == "content.delta" and event.parsed is not None:
                parsed.append(event.parsed)
            if event.type == "content.done":
                assert event.parsed == EXPECTED
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == EXPECTED
    assert parsed and parsed[-1] == json.loads(TEXT)


def test_strict_function_tools_come_parsed(forced: Forced) -> None:
    forced.says(f"Look.\n{CALL % TEXT}")
    choice = chat(forced).parse(**ASK, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and call.function.parsed_arguments == EXPECTED


def test_strict_function_tools_come_parsed_from_a_stream(forced: Forced) -> None:
    forced.says(f"{CALL % TEXT}\n{CALL % TEXT}")
    done = []
    with chat(forced).stream(**ASK, tools=[TOOL]) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.name, event.parsed_arguments))
        final = stream.get_final_completion()
    assert done == [(0, "weather", EXPECTED), (1, "weather", EXPECTED)]
    assert len(final.choices[0].message.tool_calls) == 2


def test_a_strict_call_that_the_model_gets_wrong_follows_the_schema_all_the_same(forced: Forced) -> None:
    forced.says(CALL % '{"unit": "fahrenheit"}')
    raw = chat(forced).create(**ASK, tools=[TOOL], max_tokens=200).choices[0]
    (call,) = raw.message.tool_calls
    assert "".join(call.function.arguments.split()).startswith('{"place":{"city":"')


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_tool_calls_may_be_ruled_out(forced: Forced, parallel: bool) -> None:
    forced.says(f"{CALL % TEXT}\n{CALL % TEXT}")
    choice = chat(forced).create(**ASK, tools=[TOOL], parallel_tool_calls=parallel).choices[0]
    assert len(choice.message.tool_calls) == 1 + parallel and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_demanded_calls_come_parsed(forced: Forced, choice: Any) -> None:
    forced.says(f'[{{"name": "weather", "parameters": {TEXT}}}]')
    (call,) = chat(forced).parse(**ASK, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls
    assert call.function.parsed_arguments == EXPECTED


def test_results_go_back_and_the_conversation_goes_on(forced: Forced) -> None:
    forced.says(CALL % TEXT)
    message = chat(forced).parse(**ASK, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18"}
    forced.says("18 degrees.")
    turns = [*ASK["messages"], message, result]
    answer = chat(forced).create(**{**ASK, "messages": turns}, tools=[TOOL]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("18 degrees.", "stop")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "w", "schema": Weather.model_json_schema()}},
        {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": Weather.model_json_schema()},
        },
    ],
)
def test_every_response_format_is_held_to(forced: Forced, form: Any) -> None:
    forced.says(TEXT)
    answer = chat(forced).create(**ASK, response_format=form).choices[0].message
    assert Weather.model_validate_json(answer.content) == EXPECTED


def test_what_refers_to_nothing_but_itself_is_told_in_plain_words(forced: Forced) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError, match="refers to nothing but itself") as raised:
        chat(forced).create(**ASK, response_format=form)
    assert "NoExtensionBias" not in raised.value.message
