"""POST /v1/completions: prompts in four forms, echo, choices by prompt and sample, logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from serving_tools import EOS, MODEL, WORDS, Served, text
from test_chat_endpoint import events

URL = "/v1/completions"
ANSWER = "".join(WORDS)


def whole(server: Served, **fields: Any) -> dict[str, Any]:
    response = server.http.post(URL, json=text(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_whole_answer_and_default_limit(server: Served) -> None:
    body = whole(server)
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "matched_stop": EOS}
    ]
    assert server.params.max_new_tokens == 16


def test_exact_chunks(server: Served) -> None:
    out = events(server.http.post(URL, json=text(stream=True, max_tokens=2)))
    blank = {"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None}
    assert [chunk["choices"][0] for chunk in out[:-1]] == [
        {**blank, "text": " alpha"},
        {**blank, "text": " beta"},
        {**blank, "text": "", "finish_reason": "length"},
    ]
    assert out[-1] == "[DONE]" and out[0]["object"] == "text_completion"


@pytest.mark.parametrize(
    ("prompt", "field", "count"),
    [
        ("abc", "text", 1),
        (["abc", "de"], "text", 2),
        ([97, 98], "input_ids", 1),
        ([[97, 98], [99]], "input_ids", 2),
        (["abc"], "text", 1),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_and_samples(server: Served, prompt: Any, field: str, count: int, n: int) -> None:
    body = whole(server, prompt=prompt, n=n)
    assert getattr(server.manager.requests[-1], field) == prompt
    assert [choice["index"] for choice in body["choices"]] == list(range(count * n))
    out = events(server.http.post(URL, json=text(prompt=prompt, n=n, stream=True)))
    joined = [""] * (count * n)
    for chunk in out[:-1]:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == [choice["text"] for choice in body["choices"]]
    single = len(prompt) if field == "input_ids" and count == 1 else 0
    expected = single or sum(
        len(p) + (field == "text") for p in ([prompt] if count == 1 and isinstance(prompt, str) else prompt)
    )
    assert body["usage"]["prompt_tokens"] == expected


@pytest.mark.parametrize(
    ("prompt", "prefixes"),
    [("abc", ["abc"]), (["abc", "de"], ["abc", "de"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])],
)
def test_echo(server: Served, prompt: Any, prefixes: list[str]) -> None:
    wanted = [prefix for prefix in prefixes for _ in range(2)]
    body = whole(server, prompt=prompt, echo=True, n=2, max_tokens=1)
    assert [choice["text"] for choice in body["choices"]] == [prefix + " alpha" for prefix in wanted]
    out = events(server.http.post(URL, json=text(prompt=prompt, echo=True, n=2, max_tokens=1, stream=True)))
    joined = [""] * len(wanted)
    for chunk in out[:-1]:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == [prefix + " alpha" for prefix in wanted]


def test_echo_of_the_prompt_alone(server: Served) -> None:
    assert whole(server, echo=True, max_tokens=0)["choices"][0]["text"] == "hi"


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_streamed_logprobs_equal_whole_ones(server: Served, tokens_per_step: int) -> None:
    server.manager.tokens_per_step = tokens_per_step
    expected = whole(server, logprobs=2)["choices"][0]["logprobs"]
    out = events(server.http.post(URL, json=text(logprobs=2, stream=True)))
    joined: dict[str, list[Any]] = {name: [] for name in expected}
    for chunk in out[:-1]:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == expected
    assert expected["tokens"] == [*WORDS, "<eos>"]
    starts = [sum(map(len, WORDS[:i])) for i in range(len(WORDS) + 1)]
    assert expected["text_offset"] == starts
    assert expected["top_logprobs"][0] == {" alpha": -0.5, "~0": -3.0}


def test_logprobs_zero_has_no_alternatives(server: Served) -> None:
    logprobs = whole(server, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None and len(logprobs["token_logprobs"]) == len(WORDS) + 1


def test_best_of_n_is_n(server: Served) -> None:
    assert len(whole(server, n=2, best_of=2)["choices"]) == 2


def test_openai_client(server: Served) -> None:
    client = server.client()
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    chunks = list(client.completions.create(model=MODEL, prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
