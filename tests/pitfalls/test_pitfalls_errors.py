"""Wrong requests: each gets a JSON error with the right status, at once, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pitfall_tools import MODEL, VOCAB, Served, folded, opened, serving

from sgviz.events.schema import RequestDispatched

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = (CHAT, TEXT, NATIVE)


def body(path: str, prompt: str = "hello", **more: Any) -> dict[str, Any]:
    """A small greedy request; `more` are OpenAI fields, for the native endpoint sampling parameters."""
    if path == NATIVE:
        return {"text": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0, **more}}
    shape = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, **shape, **more}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which must have the one shape and be strict JSON."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    found = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["code"] == status and found["error"]["message"]
    return found["error"]


@pytest.fixture
def undisturbed(server: Served) -> Iterator[Served]:
    """The server while a stream runs on it; in the end that stream must be what it is alone, and no request of
    the test may have reached the scheduler."""
    asked = {**body(TEXT, "undisturbed", ignore_eos=True), "max_tokens": 400, "stream": True}
    alone = server.post(TEXT, {**asked, "stream": False}).json()["choices"][0]["text"]
    dispatched = len(server.events_of(RequestDispatched))
    with server.http.stream("POST", TEXT, json=asked) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        yield server
        rest = [line[6:] for line in [first, *lines] if line.startswith("data: ")]
    assert rest[-1] == "[DONE]"
    assert folded([json.loads(event) for event in rest[:-1]])[0].text == alone
    assert len(server.events_of(RequestDispatched)) == dispatched + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_longer_than_the_context_is_400(undisturbed: Served, path: str, stream: bool) -> None:
    """HTTP 400 with a JSON error, also for a stream; never 200, an empty stream or 500. sgl-project/sglang#12081,
    ardanlabs/kronk#862, lmstudio-ai/lmstudio-bug-tracker#2339
    """
    error = error_of(undisturbed.post(path, {**body(path, "far too long " * 1000), "stream": stream}), 400)
    assert "2048" in error["message"] and "tokens" in error["message"]
    limit = {"max_new_tokens": 5000} if path == NATIVE else {"max_tokens": 5000}
    error = error_of(undisturbed.post(path, {**body(path, **limit), "stream": stream}), 400)
    (name,) = limit
    assert "5000" in error["message"] and error["param"] == (
        f"sampling_params.{name}" if path == NATIVE else name
    )


RAW = {
    "no JSON": b"{",
    "no object": b"[1, 2]",
    "empty": b"",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "half a surrogate": b'{"prompt": "x", "stop": ["\\ud800"]}',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"prompt": "\xff"}',
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"max_tokens": "4"}, "max_tokens"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"n": 1.5}, "n"),
    (TEXT, {"stop": [1]}, "stop"),
    (NATIVE, {"text": 5}, "text"),
    (NATIVE, {"sampling_params": []}, ""),
    (NATIVE, {"sampling_params": {"max_new_token": 3}}, "sampling_params.max_new_token"),
    (NATIVE, {"text": None}, "text"),
]


@pytest.mark.parametrize(("path", "change", "param"), WRONG)
def test_an_ill_typed_body_is_400_and_names_its_field(
    server: Served, path: str, change: dict[str, Any], param: str
) -> None:
    """400 with the error object, never 500 and never a silent 200. sgl-project/sglang#3805,
    sgl-project/sglang#7487
    """
    for stream in (False, True):
        error = error_of(server.post(path, {**body(path), "stream": stream, **change}), 400)
        assert param in (error["param"] or "")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", RAW)
def test_a_malformed_body_is_400(server: Served, path: str, kind: str) -> None:
    """Whatever bytes arrive, the answer is 400 in JSON. sgl-project/sglang#3805, sgl-project/sglang#31404"""
    answer = server.http.post(path, content=RAW[kind], headers={"content-type": "application/json"})
    error_of(answer, 400)


def test_a_wrong_content_type_method_or_path(server: Served) -> None:
    """Also the errors before the body have the one shape. sgl-project/sglang#7487"""
    form = server.http.post(
        CHAT, content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert "application/json" in error_of(form, 400)["message"]
    assert "POST" in error_of(server.http.get(CHAT), 405)["message"]
    assert "/v1/nothing" in error_of(server.post("/v1/nothing", {}), 404)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_404(server: Served, stream: bool) -> None:
    """404 with the error object, streamed or not. sgl-project/sglang#31404"""
    for path in (CHAT, TEXT):
        error = error_of(server.post(path, {**body(path), "model": "gpt-4o", "stream": stream}), 404)
        assert "gpt-4o" in error["message"] and MODEL in error["message"]


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": 1e999}, {"top_p": 0}, {"top_p": 1.01}, {"top_k": 0}, {"top_k": -2},
    {"min_p": -1}, {"min_p": 2}, {"frequency_penalty": 2.1}, {"presence_penalty": -2.1},
    {"repetition_penalty": 0}, {"repetition_penalty": 2.5}, {"n": 0}, {"n": 10**6}, {"n": 10**30},
    {"stop_token_ids": [VOCAB]}, {"stop_token_ids": [-1]}, {"stop": [""]}, {"stop": ["x"] * 100},
    {"logit_bias": {"1": 1e400}}, {"stream_interval": 0},
]  # fmt: skip


@pytest.mark.parametrize("wrong", OUT_OF_RANGE, ids=str)
def test_a_sampling_value_that_is_not_allowed_is_an_immediate_400(
    server: Served, wrong: dict[str, Any]
) -> None:
    """NaN, infinite, out of range or absurdly large: 400 in strict JSON, before anything runs.
    sgl-project/sglang#28153, raullenchai/Rapid-MLX#740, sgl-project/sglang#37202
    """
    before = len(server.events_of(RequestDispatched))
    for path in PATHS:
        for stream in (False, True):
            # json.dumps writes the infinities as clients that do not look do
            content = json.dumps({**body(path, **wrong), "stream": stream})
            answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
            error_of(answer, 400)
    assert len(server.events_of(RequestDispatched)) == before


def test_a_negative_limit_and_min_above_max(server: Served) -> None:
    """The same for the limits of the answer. sgl-project/sglang#37202"""
    for wrong in ({"max_tokens": -1}, {"min_tokens": 9}, {"min_tokens": -1}):
        for path in (CHAT, TEXT):
            error_of(server.post(path, {**body(path), **wrong}), 400)
    for wrong in ({"max_new_tokens": -1}, {"min_new_tokens": 9}):
        error_of(server.post(NATIVE, body(NATIVE, **wrong)), 400)


def test_top_k_above_the_vocabulary_is_no_limit(server: Served) -> None:
    """torch-spyre/sendnn-inference#542"""
    answers = []
    for top_k in (-1, VOCAB, VOCAB + 1, 2**40, 10**30):
        asked = {**body(TEXT, "x"), "temperature": 1.0, "seed": 1, "max_tokens": 12, "top_k": top_k}
        answers.append(server.post(TEXT, asked).json()["choices"][0]["text"])
    assert answers == answers[:1] * 5


NO_TOKENS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": ""}), (TEXT, {"prompt": []}), (TEXT, {"prompt": [[]]}), (TEXT, {"prompt": ["x", ""]}),
    (TEXT, {"prompt": [VOCAB]}), (TEXT, {"prompt": [-1]}), (TEXT, {"prompt": [[1, 2], [VOCAB + 5]]}),
    (TEXT, {"prompt": [2**70]}), (TEXT, {"prompt": [True]}), (TEXT, {"prompt": [1, "x"]}),
    (NATIVE, {"text": ""}), (NATIVE, {"text": None, "input_ids": []}),
    (NATIVE, {"text": None, "input_ids": [VOCAB]}), (NATIVE, {"text": None, "input_ids": [[4], [-3]]}),
]  # fmt: skip


def test_input_without_tokens_or_with_ids_outside_the_vocabulary_is_400_for_that_request(
    undisturbed: Served,
) -> None:
    """The others run on. vllm-project/vllm#7283, vllm-project/vllm#7746, Blaizzy/mlx-vlm#1491"""
    for path, change in NO_TOKENS:
        for stream in (False, True):
            error_of(undisturbed.post(path, {**body(path), **change, "stream": stream}), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_that_comes_first_is_the_status(stream: bool) -> None:
    """A refusal by the scheduler arrives as the first item of an answer and must be its HTTP status, also for a
    stream: here 503 for a full queue. sgl-project/sglang#12081
    """
    long = {"text": "x", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    limits = {"max_running_requests": 1, "max_queued_requests": 1}
    with serving(device="mock", mock_step_ms=20.0, **limits) as server:
        held = []
        for running, waiting in ((1, 0), (1, 1)):
            held.append(opened(server.url, NATIVE, {**long, "stream": True}))
            server.until(num_running_reqs=running, num_waiting_reqs=waiting)
        for path in PATHS:
            error = error_of(server.post(path, {**body(path), "stream": stream}), 503)
            assert "queue is full" in error["message"] and error["type"] == "ServiceUnavailableError"
        for connection in held:
            connection.close()
        server.assert_empty()
