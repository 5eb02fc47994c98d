"""Structured output through a whole engine: what comes back matches, as text, as a stream, and as a client sees it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from made_grammars import regex_of, schema_of

from sgviz.engine import Engine
from sgviz.errors import BadRequest, SgvizError
from sgviz.events.schema import GrammarReady

SMALL = {"torch_threads": 1, "max_total_tokens": 24_000, "max_running_requests": 32}
LIMIT = 700
MOST_UNFINISHED = 0.05
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
Output = dict[str, Any]


@pytest.fixture(scope="module", params=[True, False], ids=["normal", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine("tiny-llama", disable_overlap_schedule=request.param, **SMALL) as running:
        yield running


def params(grammar: Output, *, greedy: bool, seed: int) -> Output:
    return {**grammar, "max_new_tokens": LIMIT, "temperature": 0.0 if greedy else 1.0, "sampling_seed": seed}


async def streamed(engine: Engine, prompt: str, sampling: Output) -> Output:
    """The last part of a stream, whose parts grow into each other."""
    before, last = "", {}
    async for part in engine.stream(prompt, sampling):
        assert part["text"].startswith(before)
        before, last = part["text"], part
    return last


async def all_of(engine: Engine, wishes: list[Output]) -> list[Output]:
    return await asyncio.gather(*(streamed(engine, f"number {i}", wish) for i, wish in enumerate(wishes)))


def finished(output: Output) -> bool:
    return output["meta_info"]["finish_reason"]["type"] == "stop"


def check_all(engine: Engine, schemas: int, regexes: int, *, greedy: bool) -> None:
    """Everything that finished matches, and nearly all did."""
    made = [{"json_schema": schema_of(seed)} for seed in range(schemas)]
    made += [{"regex": regex_of(seed)} for seed in range(regexes)]
    wishes = [params(one, greedy=greedy, seed=seed) for seed, one in enumerate(made)]
    outputs = asyncio.run(all_of(engine, wishes))
    unfinished = [wish for wish, output in zip(made, outputs) if not finished(output)]
    for wish, output in zip(made, outputs):
        if not finished(output):
            continue
        text = output["text"]
        if "regex" in wish:
            assert re.fullmatch(wish["regex"], text), (wish, text)
        else:
            Draft202012Validator(wish["json_schema"]).validate(json.loads(text))
    assert len(unfinished) <= MOST_UNFINISHED * len(made), unfinished


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_what_is_made_under_a_grammar_matches_it(engine: Engine, greedy: bool) -> None:
    check_all(engine, 24, 10, greedy=greedy)


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_two_hundred_schemas_and_fifty_regexes_match(engine: Engine, greedy: bool) -> None:
    check_all(engine, 200, 50, greedy=greedy)


def test_both_loops_give_the_same_ids_beside_requests_without_a_grammar() -> None:
    found = []
    for normal in (True, False):
        with Engine("tiny-llama", disable_overlap_schedule=normal, **SMALL) as engine:
            wishes: list[Output] = []
            for seed in range(8):
                grammar = ({"json_schema": schema_of(seed)}, {}, {"regex": regex_of(seed)}, {})[seed % 4]
                wishes.append(params(grammar, greedy=seed % 3 == 0, seed=seed) | {"max_new_tokens": 60})
            outputs = asyncio.run(all_of(engine, wishes))
            found.append([output["output_ids"] for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "((("},
        {"json_schema": {"not": {}}},
        {"ebnf": "root ::= other"},
        {"structural_tag": {"structures": [], "triggers": []}},
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails_alone(engine: Engine, grammar: Output) -> None:
    async def both() -> tuple[object, Output]:
        bad = streamed(engine, "bad", {**grammar, "max_new_tokens": 8})
        good = streamed(engine, "good", params({"regex": "[a-c]{3}"}, greedy=True, seed=0))
        one, other = await asyncio.gather(bad, good, return_exceptions=True)
        assert isinstance(other, dict), other
        return one, other

    refused, answered = asyncio.run(both())
    assert isinstance(refused, BadRequest) and "cannot be compiled" in refused.message
    assert re.fullmatch("[a-c]{3}", answered["text"])
    with pytest.raises(BadRequest, match="cannot be compiled"):
        engine.generate("again", {**grammar, "max_new_tokens": 8})


def test_a_pathological_grammar_ends_or_is_refused_and_others_go_on(engine: Engine) -> None:
    words = "|".join(f"w{i * 7919}x" for i in range(12_000))
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 9999} for i in range(900)},
    }
    heavy: list[Output] = [{"regex": words}, {"json_schema": wide}, {"regex": "(.*a){20}"}]

    async def one(number: int, grammar: Output) -> object:
        try:
            return await streamed(engine, f"p{number}", {**grammar, "max_new_tokens": 12, "temperature": 0.0})
        except SgvizError as error:
            return error.status

    async def together() -> list[object]:
        plain = [one(i, {}) for i in range(4)]
        return await asyncio.gather(*plain, *(one(9 + i, grammar) for i, grammar in enumerate(heavy)))

    results = asyncio.run(together())
    assert all(isinstance(result, dict) for result in results[:4])
    assert all(isinstance(result, dict) or result == 400 for result in results[4:])


def test_samples_of_one_request_have_states_of_their_own(engine: Engine) -> None:
    outputs = engine.generate("n", {"regex": "[a-z]{6}[0-9]{3}", "n": 4, "max_new_tokens": 20})
    texts = [output["text"] for output in outputs]
    assert all(re.fullmatch("[a-z]{6}[0-9]{3}", text) for text in texts) and len(set(texts)) > 1


def test_logprobs_are_of_the_tokens_that_may_come(engine: Engine) -> None:
    out = engine.generate(
        "p",
        {"regex": "[ab]{4}", "max_new_tokens": 8, "temperature": 0.0},
        return_logprob=True,
        top_logprobs_num=2,
    )
    chosen = [entry[0] for entry in out["meta_info"]["output_token_logprobs"]]
    best = [tops[0][0] for tops in out["meta_info"]["output_top_logprobs"]]
    assert chosen == pytest.approx(best) and all(value <= 0.0 for value in chosen)


def test_the_recording_says_who_waited_for_a_grammar(engine: Engine) -> None:
    """The wait is a cause of its own, the compilation an event, and the rest of the way as ever."""
    words = "|".join(f"w{i * 7919}{id(engine)}" for i in range(3000))  # takes a while
    first = engine.generate("g", {"regex": words, "max_new_tokens": 3}, rid=f"first{id(engine)}")
    again = engine.generate("g", {"regex": words, "max_new_tokens": 3}, rid=f"again{id(engine)}")
    bad = f"bad{id(engine)}"
    with pytest.raises(BadRequest):
        engine.generate("g", {"regex": "[z-a]", "max_new_tokens": 12}, rid=bad)
    recording = engine.recording().freeze()
    ready = {
        event.body.rid: (event.body.hit, event.body.compile_ns > 0)
        for event in engine.pipeline.ring.snapshot()
        if isinstance(event.body, GrammarReady)
    }
    assert ready[first["meta_info"]["id"]] == (False, True)
    assert ready[again["meta_info"]["id"]] == (True, False)
    explained = recording.explain(first["meta_info"]["id"])
    waits = [part for part in explained.parts if part.cause == "grammar"]
    assert len(waits) == 1 and f"regex of {len(words):,} characters, compiled in" in waits[0].detail
    assert explained.unexplained_ns == 0
    assert not [part for part in recording.explain(again["meta_info"]["id"]).parts if part.cause == "grammar"]
    refused = recording.explain(bad)
    assert "cannot be compiled" in refused.refused and refused.unexplained_ns == 0
    assert recording.audit().balanced


# ---------------------------------------------------------------- over HTTP


class Step(BaseModel):
    kind: Literal["add", "sub"]
    amount: Literal[1, 2, 3]


class Plan(BaseModel):
    done: bool
    first: Step
    label: Literal["x", "y"] | None


@pytest.fixture(scope="module")
def client(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=engine.serve(port=0).url + "/v1", api_key="none", max_retries=0)


ASK: Any = {"model": "default", "messages": [{"role": "user", "content": "plan"}], "max_tokens": 400}


def test_parse_gives_a_pydantic_model(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(**ASK, response_format=Plan, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Plan)
        assert answer.choices[0].finish_reason == "stop"


def test_a_stream_gives_the_same_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ASK, response_format=Plan, seed=1) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    whole = client.chat.completions.parse(**ASK, response_format=Plan, seed=1)
    assert isinstance(parsed, Plan) and parsed == whole.choices[0].message.parsed


def test_json_object_and_text(client: openai.OpenAI) -> None:
    object_ = {"json_schema": {"type": "object"}}
    for _ in range(2):
        answer = client.chat.completions.create(**ASK, response_format={"type": "json_object"}, seed=5)
        content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert content and content.startswith("{")
        if reason == "stop":
            Draft202012Validator(object_["json_schema"]).validate(json.loads(content))
    plain = client.chat.completions.create(**{**ASK, "max_tokens": 4}, response_format={"type": "text"})
    assert plain.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": {"enum": ["p", "q"]}}, '"p"|"q"'),
        ({"json_schema": '{"enum": [1, 22]}'}, "1|22"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "const_string", "value": "so"},
                }
            },
            "so",
        ),
    ],
)
def test_the_own_fields_work_for_chat_and_completions(
    client: openai.OpenAI, extra: Output, pattern: str
) -> None:
    chat = client.chat.completions.create(**ASK, extra_body=extra)
    text = client.completions.create(model="default", prompt="p", max_tokens=40, extra_body=extra)
    for content, reason in (
        (chat.choices[0].message.content, chat.choices[0].finish_reason),
        (text.choices[0].text, text.choices[0].finish_reason),
    ):
        assert re.fullmatch(pattern, content or "") and reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_bad_request_before_any_stream(
    client: openai.OpenAI, stream: bool
) -> None:
    schema = {"name": "n", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            **ASK, response_format={"type": "json_schema", "json_schema": schema}, stream=stream
        )


def of_schema(**named: object) -> Output:
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "jsonschema"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (of_schema(schema={}), "response_format.json_schema.name"),
        (of_schema(name="n"), "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"structural_tag": "true"}, "structural_tag"),
        ({"ebnf": ""}, "ebnf"),
        ({"regex": "a" * 300_000}, "regex"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ],
)
def test_a_wrong_form_is_told_by_its_field(client: openai.OpenAI, extra: Output, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**ASK, extra_body=extra)
    assert found.value.param == param


def test_without_a_backend_a_grammar_is_refused() -> None:
    with Engine("tiny-llama", grammar_backend="none", **SMALL) as engine:
        with pytest.raises(BadRequest, match="grammar_backend none"):
            engine.generate("x", {"regex": "a"})
        assert engine.generate("x", {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "setting",
    [{"constrained_json_disable_any_whitespace": True}, {"constrained_json_whitespace_pattern": ""}],
    ids=["disabled", "empty pattern"],
)
def test_the_settings_of_white_space_hold(setting: dict[str, Any]) -> None:
    with Engine("tiny-llama", **setting, **SMALL) as engine:
        out = engine.generate("x", params({"json_schema": OBJECT}, greedy=False, seed=1))
        assert re.fullmatch(r'\{"a":[0-9]{1,2}\}', out["text"])


@pytest.mark.slow
def test_it_works_in_processes() -> None:
    with Engine("tiny-llama", mode="processes", disable_overlap_schedule=False, **SMALL) as engine:
        out = engine.generate("x", params({"json_schema": OBJECT}, greedy=False, seed=1))
        Draft202012Validator(OBJECT).validate(json.loads(out["text"]))
        with pytest.raises(BadRequest, match="cannot be compiled"):
            engine.generate("x", {"regex": "((("})


@pytest.mark.slow
def test_a_simulated_device_keeps_to_grammars_too() -> None:
    with Engine("tiny-llama", device="sim:h200", **SMALL) as engine:
        outputs = [
            engine.generate("x", params({"regex": "[0-9]{3}-[a-c]{2}"}, greedy=False, seed=i))
            for i in range(4)
        ]
        assert all(re.fullmatch("[0-9]{3}-[a-c]{2}", output["text"]) for output in outputs)
