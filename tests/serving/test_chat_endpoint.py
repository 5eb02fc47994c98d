"""POST /v1/chat/completions: chunk sequences, whole answers, usage, parameters; also by the openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving_tools import EOS, MODEL, WORDS, Served, chat, served

ANSWER = "".join(WORDS)
PROMPT = "user:hi\nassistant:"
URL = "/v1/chat/completions"


def events(response: httpx.Response) -> list[Any]:
    """The decoded events of an SSE answer; every event is one `data:` line."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks[:-1]]


def stream(server: Served, **fields: Any) -> list[Any]:
    return events(server.http.post(URL, json=chat(stream=True, **fields)))


def whole(server: Served, **fields: Any) -> dict[str, Any]:
    response = server.http.post(URL, json=chat(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_whole_answer(server: Served) -> None:
    body = whole(server)
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": ANSWER,
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS,
        }
    ]
    count = len(WORDS) + 1
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": count,
        "total_tokens": len(PROMPT) + count,
        "prompt_tokens_details": None,
    }


def test_exact_chunks(server: Served) -> None:
    out = stream(server, max_tokens=2)
    assert out[-1] == "[DONE]"
    choices = [chunk["choices"][0] for chunk in out[:-1]]
    blank = {"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None}
    assert choices == [
        {**blank, "delta": {"role": "assistant", "content": ""}},
        {**blank, "delta": {"content": " alpha"}},
        {**blank, "delta": {"content": " beta"}},
        {**blank, "delta": {}, "finish_reason": "length"},
    ]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in out[:-1]}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in out[:-1])


@pytest.mark.parametrize("n", [1, 3])
def test_every_choice_has_one_role_and_one_finish_and_nothing_after_it(server: Served, n: int) -> None:
    out = stream(server, n=n, stream_options={"include_usage": True})
    assert out.count("[DONE]") == 1 and out[-1] == "[DONE]"
    assert out[-2]["choices"] == []
    by_index: dict[int, list[dict[str, Any]]] = {}
    for chunk in out[:-2]:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        by_index.setdefault(choice["index"], []).append(choice)
    assert sorted(by_index) == list(range(n))
    expected = whole(server, n=n)
    for index, choices in by_index.items():
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
        finishes = [choice["finish_reason"] for choice in choices]
        assert finishes[:-1] == [None] * (len(choices) - 1) and finishes[-1] == "stop"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == expected["choices"][index]["message"]["content"]
    assert out[-2]["usage"] == expected["usage"]
    assert expected["usage"]["prompt_tokens"] == len(PROMPT)


def test_role_comes_even_without_text(server: Served) -> None:
    out = stream(server, max_tokens=0)
    assert [chunk["choices"][0]["delta"] for chunk in out[:-1]] == [{"role": "assistant", "content": ""}, {}]
    assert out[-2]["choices"][0]["finish_reason"] == "length"
    assert server.params.max_new_tokens == 0


def test_continuous_usage(server: Served) -> None:
    out = stream(server, max_tokens=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in out[:-1]] == [1, 1, 2, 2, 2]


def test_usage_by_default_of_the_server_and_cache_report(server: Served) -> None:
    server.context.default_include_usage = server.context.enable_cache_report = True
    out = stream(server, n=2)
    assert out[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert whole(server, n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    off = stream(server, stream_options={"include_usage": False})
    assert all(chunk["choices"] for chunk in off[:-1])


def test_stop_string(server: Served) -> None:
    body = whole(server, stop=[" gam"])
    assert body["choices"][0]["message"]["content"] == " alpha beta"
    assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["matched_stop"] == " gam"
    out = stream(server, stop=" gam")
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in out[:-1]) == " alpha beta"
    assert out[-2]["choices"][0]["matched_stop"] == " gam"


@pytest.mark.parametrize("tokens_per_step", [1, 2, 4, 9])
def test_streamed_logprobs_equal_whole_ones(server: Served, tokens_per_step: int) -> None:
    server.manager.tokens_per_step = tokens_per_step
    expected = whole(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    out = stream(server, logprobs=True, top_logprobs=2)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in out[:-1]]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == expected
    assert len(expected) == len(WORDS) + 1
    first = expected[0]
    assert first["token"] == " alpha" and bytes(first["bytes"]) == b" alpha" and first["logprob"] == -0.5
    assert [top["token"] for top in first["top_logprobs"]] == [" alpha", "~0"]


def test_no_logprobs_unless_asked(server: Served) -> None:
    assert whole(server, logprobs=False)["choices"][0]["logprobs"] is None
    assert not server.manager.requests[-1].return_logprob


@pytest.mark.parametrize(
    ("content", "plain"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_forms_give_the_same_prompt(server: Served, content: Any, plain: str) -> None:
    whole(server, messages=[{"role": "user", "content": content}])
    ids = server.manager.requests[-1].input_ids
    whole(server, messages=[{"role": "user", "content": plain}])
    assert server.manager.requests[-1].input_ids == ids


def test_messages_reach_the_template_whole(server: Served) -> None:
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "tool_calls": call},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    whole(server, messages=messages, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert server.templates.seen[-1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert server.templates.options[-1] == {"enable_thinking": False, "reasoning_effort": "low"}


def test_continue_final_message(server: Served) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    whole(server, messages=messages, continue_final_message=True)
    assert server.manager.requests[-1].input_ids == [ord(char) for char in PROMPT + "Well"]


def test_parameters_reach_the_engine(server: Served) -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2,
        "presence_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"5": -1.0}, "ignore_eos": True,
        "skip_special_tokens": False, "no_stop_trim": True, "stream_interval": 4, "n": 2,
        "spaces_between_special_tokens": False,
    }  # fmt: skip
    body = chat(**sampling, stop=["x", "y"], stop_token_ids=[7, 8], seed=11, min_tokens=1, max_tokens=9)
    assert server.http.post(URL, json={**body, "extra_key": "k", "cache_salt": "s", "user": "u"}).is_success
    obj = server.manager.requests[-1]
    params = server.params
    assert {name: getattr(params, name) for name in sampling} == sampling
    assert (params.stop, params.stop_token_ids, params.sampling_seed) == (("x", "y"), (7, 8), 11)
    assert (params.min_new_tokens, params.max_new_tokens) == (1, 9)
    assert obj.extra_key == "s\0k" and obj.received_ns > 0


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 0}, 0),
        ({"max_tokens": 0}, 0),
    ],
)
def test_limits(server: Served, fields: dict[str, Any], limit: int | None) -> None:
    whole(server, **fields)
    assert server.params.max_new_tokens == limit


def test_null_means_absent_and_the_models_defaults_apply() -> None:
    names = ("temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "logit_bias", "stream_options")
    with served(default_sampling={"temperature": 0.2, "top_k": 20}) as server:
        whole(server, **dict.fromkeys(names))
        nulls = server.params
        whole(server)
        assert server.params == nulls
        assert (nulls.temperature, nulls.top_p, nulls.top_k) == (0.2, 1.0, 20)
        whole(server, temperature=0.9)
        assert server.params.temperature == 0.9


def test_openai_client(server: Served) -> None:
    client = server.client()
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content or []) == len(WORDS) + 1
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage == answer.usage
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
