"""Bad input: always 400 (404, 503) in the one shape, by name, and never 422 or 500."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from serving_tools import MODEL, Served, chat, error_of, text
from test_chat_endpoint import events

from sgviz.errors import BadRequest, Unavailable
from sgviz.serving import ServerState
from sgviz.serving.later import TABLE, On
from sgviz.serving.protocol import ChatCompletionRequest, GenerateRequest

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def say(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


# path, body, the field that the error names (None: no single one)
BAD: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, chat(messages=None), "messages"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, chat(messages=["hi"]), "messages[0]"),
    (CHAT, chat(messages=[{"content": "hi"}]), "messages[0].role"),
    (CHAT, chat(**say("hi", role="usr")), "messages[0].role"),
    (CHAT, chat(**say("hi", role=3)), "messages[0].role"),
    (CHAT, chat(**say(3)), "messages[0].content"),
    (CHAT, chat(**say({"text": "hi"})), "messages[0].content"),
    (CHAT, chat(**say([{"type": "text"}])), "messages[0].content[0].text"),
    (CHAT, chat(**say([{"text": "hi"}])), "messages[0].content[0].type"),
    (CHAT, chat(**say([{"type": "image_url", "image_url": {"url": "x"}}])), "messages[0].content[0]"),
    (CHAT, chat(**say([{"type": "input_audio"}])), "messages[0].content[0]"),
    (CHAT, chat(**say([{"type": "hologram"}])), "messages[0].content[0].type"),
    (CHAT, chat(**say("refuse me")), "messages"),
    (CHAT, chat(model=7), "model"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options=True), "stream_options"),
    (CHAT, chat(max_tokens="9"), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=10**30), "max_tokens"),
    (CHAT, chat(max_tokens=1.5), "max_tokens"),
    (CHAT, chat(min_tokens=5, max_tokens=2), "min_tokens"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=-1), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=2), "top_p"),
    (CHAT, chat(top_k=0), "top_k"),
    (CHAT, chat(min_p=-0.1), "min_p"),
    (CHAT, chat(frequency_penalty=3), "frequency_penalty"),
    (CHAT, chat(presence_penalty=-3), "presence_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=10**6), "n"),
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(seed=2**64), "seed"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop=[1]), "stop[0]"),
    (CHAT, chat(stop=[""]), "stop"),
    (CHAT, chat(stop=["x"] * 33), "stop"),
    (CHAT, chat(stop_token_ids=[10**40]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids="1"), "stop_token_ids"),
    (CHAT, chat(logit_bias={"99999": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 1000}), "logit_bias"),
    (CHAT, chat(logit_bias=[1]), "logit_bias"),
    (CHAT, chat(logprobs=3), "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (CHAT, chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"tools": [1]}), "chat_template_kwargs.tools"),
    (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs.chat_template"),
    (CHAT, chat(rid=["a"]), "rid"),
    (CHAT, chat(**say("x" * 100)), None),
    (TEXT, {"model": MODEL}, "prompt"),
    (TEXT, text(prompt=5), "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=[[]]), None),
    (TEXT, text(prompt=["a", 1]), "prompt[1]"),
    (TEXT, text(prompt=[1, "a"]), "prompt[1]"),
    (TEXT, text(prompt=[True]), "prompt[0]"),
    (TEXT, text(prompt=[[1], [1.5]]), "prompt[1]"),
    (TEXT, text(prompt=[-1]), None),
    (TEXT, text(prompt=[10**40]), None),
    (TEXT, text(prompt="x" * 100), None),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(logprobs=-1), "logprobs"),
    (TEXT, text(n=3, best_of=2), "best_of"),
    (GENERATE, {}, "text"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"text": 3}, "text"),
    (GENERATE, {"input_ids": [1, [2]]}, "input_ids[1]"),
    (GENERATE, {"input_ids": []}, "input_ids"),
    (GENERATE, {"text": "a", "sampling_params": 3}, "sampling_params"),
    (GENERATE, {"text": "a", "sampling_params": [{}]}, "sampling_params"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    (GENERATE, {"text": ["a"], "sampling_params": [{"top_p": "x"}]}, "sampling_params[0].top_p"),
    (GENERATE, {"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 2**70}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"text": "a", "rid": ["x"]}, "rid"),
    (GENERATE, {"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
    (GENERATE, {"text": "a", "top_logprobs_num": 10**6}, "top_logprobs_num"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": 3}, "rid"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": [1]}, "prompt[0]"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_fields(
    server: Served, path: str, body: dict[str, Any], param: str | None, streamed: bool
) -> None:
    body = body if "stream" in body or not streamed else {**body, "stream": True}
    error = error_of(server.http.post(path, json=body))
    assert error["code"] == 400 and error["type"] == "BadRequestError"
    assert error["param"] == param
    words = (param or "").replace("_", " ").replace("[", " ").replace(".", " ").split()
    assert all(word in error["message"] for word in words)


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[1]", b'"x"', b"null", b'{"temperature": NaN}', b'{"temperature": 1e999}', b"\xff\xfe",
        b'{"a": "\\ud800"}', b"[" * 50_000, b'{"a": 1,}', b'{"a": "\xff"}',
    ],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
def test_bad_bodies(server: Served, path: str, raw: bytes) -> None:
    response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert error_of(response)["code"] == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_content_type(server: Served, kind: str) -> None:
    response = server.http.post(CHAT, content=b"{}", headers={"content-type": kind} if kind else {})
    assert "application/json" in error_of(response)["message"]
    charset = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post(GENERATE, content=b'{"text": "a"}', headers=charset).status_code == 200


VALUES: dict[str, Any] = {
    "tool_choice": "required", "function_call": {"name": "f"}, "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"], "best_of": 3, "max_thinking_tokens": 0, "thinking_budget": 5,
    "web_search_options": {},
}  # fmt: skip
PATHS = {
    On.CHAT: (CHAT, chat()),
    On.COMPLETION: (TEXT, text(logprobs=1)),
    On.GENERATE: (GENERATE, {"text": "a", "return_logprob": True}),
}
LATER = [(line, on) for line in TABLE for on in PATHS if on & line.on]


@pytest.mark.parametrize(("line", "on"), LATER, ids=lambda value: getattr(value, "field", str(value)))
def test_later_features_are_refused_by_name(server: Served, line: Any, on: On) -> None:
    path, body = PATHS[on]
    error = error_of(server.http.post(path, json={**body, line.field: VALUES.get(line.field, ["x"])}))
    assert error["code"] == 400 and error["param"] == line.field and line.field in error["message"]
    assert server.http.post(path, json={**body, line.field: None}).status_code == 200


@pytest.mark.parametrize(
    "line", [line for line in TABLE if line.on & On.SAMPLING], ids=lambda line: line.field
)
def test_later_sampling_parameters(server: Served, line: Any) -> None:
    error = error_of(server.http.post(GENERATE, json={"text": "a", "sampling_params": {line.field: "x"}}))
    assert error["param"] == f"sampling_params.{line.field}"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"modalities": ["text"]},
        {"response_format": {"type": "text"}}, {"lora_path": ""}, {"return_hidden_states": False},
        {"metadata": {"a": "b"}, "store": True, "unknown": [1]}, {"routed_dp_rank": 0},
    ],
)  # fmt: skip
def test_values_that_change_nothing_pass(server: Served, fields: dict[str, Any]) -> None:
    assert server.http.post(CHAT, json=chat(**fields)).status_code == 200


def test_what_is_no_tool_is_refused_even_with_choice_none(server: Served) -> None:
    error = error_of(server.http.post(CHAT, json=chat(tools=[{"type": "function"}], tool_choice="none")))
    assert error["param"] == "tools[0].function"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/v1/detokenize"])
def test_unknown_model(server: Served, path: str) -> None:
    body = {**chat(), "prompt": "a", "tokens": [65]}
    error = error_of(server.http.post(path, json={**body, "model": "gpt-x"}))
    assert error["code"] == 404 and error["param"] == "model" and MODEL in error["message"]
    for name in (MODEL, "default", None):
        assert server.http.post(path, json={**body, "model": name}).status_code == 200


def test_unknown_paths_and_methods(server: Served) -> None:
    assert error_of(server.http.get("/nope"))["code"] == 404
    assert error_of(server.http.get("/v1/models/other"))["code"] == 404
    response = server.http.get(CHAT)
    assert error_of(response)["code"] == 405 and response.headers["allow"] == "POST"


def test_openai_client_sees_its_own_exceptions(server: Served) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[], temperature=1)
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="x", prompt="a")


GENERATING: list[tuple[str, dict[str, Any]]] = [(CHAT, chat()), (TEXT, text()), (GENERATE, {"text": "a"})]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("state", [ServerState.STARTING, ServerState.STOPPING, ServerState.UNHEALTHY])
def test_not_up_is_503(server: Served, state: ServerState, streamed: bool) -> None:
    server.status.state, server.status.message = state, "because"
    for path, body in GENERATING:
        error = error_of(server.http.post(path, json={**body, "stream": streamed}))
        assert error["code"] == 503 and state in error["message"] and "because" in error["message"]


# SGLang's GenerateReqInput, as its pipeline facts list it (3.2), and what is not in there of the chat body
OF_GENERATE = [
    "rid", "session_id", "text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data",
    "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
    "return_text_in_logprobs", "stream", "log_metrics", "return_hidden_states", "return_routed_experts",
    "session_params", "lora_path", "lora_id", "custom_logit_processor", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "routing_key", "priority", "extra_key",
    "cache_salt", "custom_labels", "background", "require_reasoning", "max_thinking_tokens",
    "return_prompt_token_ids", "multi_item_delimiter_indices", "token_indices_to_pool",
]  # fmt: skip
OF_CHAT = [
    "tools",
    "tool_choice",
    "response_format",
    "input_ids",
    "web_search_options",
    "modalities",
    "priority",
]
# these change nothing in the answer of one server; labels for its metrics come by header
WITHOUT_EFFECT = {"log_metrics", "custom_labels", "routing_key"}


@pytest.mark.parametrize(
    ("name", "kind", "on"),
    [(name, GenerateRequest, On.GENERATE) for name in OF_GENERATE]
    + [(name, ChatCompletionRequest, On.CHAT) for name in OF_CHAT],
)
def test_every_field_of_sglang_is_read_refused_or_without_effect(
    server: Served, name: str, kind: type[msgspec.Struct], on: On
) -> None:
    read, refused = name in kind.__struct_fields__, {line.field for line in TABLE if line.on & on}
    assert read + (name in refused and not read) + (name in WITHOUT_EFFECT) == 1
    if name in refused:
        path, body = PATHS[on]
        error = error_of(server.http.post(path, json={**body, name: VALUES.get(name, ["x"])}))
        assert error["code"] == 400 and error["param"] == name


def test_faults_of_the_server_are_500_and_logged(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    error = error_of(server.http.post(CHAT, json=chat(**say("break"))))
    assert error["code"] == 500 and "a fault of the server" in error["message"]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
    assert error_of(server.http.post(CHAT, json=chat(**say("refuse me"))))["code"] == 400


@pytest.mark.parametrize(
    ("path", "body", "param", "public"),
    [
        (CHAT, chat(), "input_ids", "messages"),
        (CHAT, chat(max_tokens=5), "max_new_tokens", "max_tokens"),
        (CHAT, chat(max_completion_tokens=5), "max_new_tokens", "max_completion_tokens"),
        (CHAT, chat(), "sampling_seed", "seed"),
        (CHAT, chat(), "temperature", "temperature"),
        (TEXT, text(), "text", "prompt"),
        (TEXT, text(prompt=[1]), "input_ids", "prompt"),
        (TEXT, text(), "max_new_tokens", "max_tokens"),
        (TEXT, text(), "min_new_tokens", "min_tokens"),
        (TEXT, text(), "top_logprobs_num", "logprobs"),
        (GENERATE, {"text": "a"}, "max_new_tokens", "sampling_params.max_new_tokens"),
        (GENERATE, {"text": "a"}, "stop", "sampling_params.stop"),
        (GENERATE, {"input_ids": [1]}, "input_ids", "input_ids"),
    ],
)
def test_what_the_tokenizer_manager_refuses_is_named_as_in_the_body(
    server: Served, path: str, body: dict[str, Any], param: str, public: str
) -> None:
    server.manager.failure = BadRequest("too much", param=param)
    assert error_of(server.http.post(path, json=body))["param"] == public


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_compartments_do_not_collide(server: Served, name: str) -> None:
    pairs = [("a", "b"), ("ab", None), (None, "ab"), ("a", None), (None, "b"), ("", "ab"), ("b", "a")]
    names = []
    for salt, key in pairs:
        assert server.http.post(TEXT, json=text(cache_salt=salt, extra_key=key)).status_code == 200
        names.append(server.manager.requests[-1].extra_key)
    assert len(set(names)) == len(pairs) - 1 and names[2] == names[5] == "ab"  # an empty salt is none
    assert error_of(server.http.post(TEXT, json=text(**{name: "a\0b"})))["param"] == name


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [(Unavailable("the queue is full"), 503), (ValueError("odd"), 500), (RuntimeError("boom"), 500)],
)
def test_errors_before_the_first_output_keep_their_status(
    server: Served, failure: Exception, status: int, streamed: bool
) -> None:
    server.manager.failure = failure
    for path, body in GENERATING:
        error = error_of(server.http.post(path, json={**body, "stream": streamed}))
        assert error["code"] == status and str(failure) in error["message"]
    assert [code for _, code in server.ends(3)] == [status] * 3


FULL = {"type": "abort", "message": "gone wrong", "status_code": 503, "err_type": "ServiceUnavailableError"}


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_an_abort_with_a_status_is_an_error(server: Served, path: str, body: dict[str, Any]) -> None:
    server.manager.abort = FULL
    error = error_of(server.http.post(path, json=body))
    assert (error["message"], error["type"], error["code"]) == ("gone wrong", FULL["err_type"], 503)
    out = events(server.http.post(path, json={**body, "stream": True}))
    assert out[-1] == {"error": error}
    assert "alpha" in str(out[:-1]) and "beta" not in str(out[:-1])
    assert not any("error" in event for event in out[:-1])
    assert [code for _, code in server.ends(2)] == [503, 503]


def test_an_abort_before_any_output_has_its_status_when_streamed_too(server: Served) -> None:
    server.manager.abort, server.manager.abort_after = FULL, 0
    assert error_of(server.http.post(CHAT, json=chat(stream=True)))["code"] == 503


def test_the_openai_client_raises_at_an_error_in_the_stream(server: Served) -> None:
    server.manager.abort = FULL
    messages: Any = [{"role": "user", "content": "hi"}]
    stream = server.client().chat.completions.create(model=MODEL, messages=messages, stream=True)
    with pytest.raises(openai.APIError, match="gone wrong"):
        list(stream)


def test_an_abort_without_a_status_is_a_normal_end(server: Served) -> None:
    server.manager.abort = {
        "type": "abort",
        "message": "by the caller",
        "status_code": None,
        "err_type": None,
    }
    body = server.http.post(CHAT, json=chat()).json()
    assert body["choices"][0]["finish_reason"] == "abort"
    assert body["choices"][0]["message"]["content"] == " alpha beta"
    out = events(server.http.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True})))
    assert out[-3]["choices"][0]["finish_reason"] == "abort"
    assert out[-2]["usage"]["completion_tokens"] == 2 and out[-1] == "[DONE]"


def test_an_error_does_not_quote_without_end_what_was_sent(server: Served) -> None:
    """The beginning and the end of a long message stay: what is wrong, and what is allowed."""
    error = error_of(server.http.post("/v1/completions", json=text(model="m" * 100_000)))
    assert len(error["message"]) < 2_000
    assert error["message"].startswith("the model 'mmm") and error["message"].endswith(f"serves {MODEL!r}")
