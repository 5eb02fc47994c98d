"""The rest of the official client: completions, models, errors as its own exceptions, and the async client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import Completion
from pitfall_tools import MODEL, Served, serving

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}
Call = Callable[[openai.OpenAI], object]


# ---------------------------------------------------------------- completions


def test_a_whole_completion_has_every_field_of_the_clients_type(server: Served) -> None:
    answer = server.complete("Once", max_tokens=6, temperature=0, logprobs=1)
    Completion.model_validate(answer.to_dict(), strict=True)
    (choice,) = answer.choices
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert choice.logprobs is not None and len(choice.logprobs.tokens or ()) == 6
    assert "".join(choice.logprobs.tokens or ()) == choice.text


@pytest.mark.parametrize("prompt", ["Once", ["Once", "Twice"], [5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_prompts_in_all_shapes_streamed_and_not(server: Served, prompt: Any) -> None:
    whole = server.complete(prompt, max_tokens=6, temperature=0, n=2)
    texts: dict[int, str] = {}
    for chunk in server.complete(prompt, max_tokens=6, temperature=0, n=2, stream=True):
        assert isinstance(chunk, Completion) and chunk.object == "text_completion"
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    prompts = 2 if isinstance(prompt[0], (list, str)) and not isinstance(prompt, str) else 1
    assert [choice.index for choice in whole.choices] == list(range(2 * prompts))
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_echo_and_stop(server: Served) -> None:
    answer = server.complete("Once upon", max_tokens=6, temperature=0, echo=True)
    assert answer.choices[0].text.startswith("Once upon")
    plain = server.complete("Once upon", max_tokens=12, temperature=0).choices[0].text
    stopped = server.complete("Once upon", max_tokens=12, temperature=0, stop=plain[4:7]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == plain[: plain.index(plain[4:7])]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 3}, "best_of"), ({"best_of": 3, "n": 2}, "best_of"), ({"suffix": "end"}, "suffix")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_built_is_refused_by_its_name(
    server: Served, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="not supported") as raised:
        server.complete("Once", stream=stream, **fields)
    assert raised.value.param == param
    assert len(server.complete("Once", n=2, best_of=2, max_tokens=2).choices) == 2  # which changes nothing


# ---------------------------------------------------------------- models


def test_models(server: Served) -> None:
    listed = list(server.client.models.list())
    assert [model.id for model in listed] == [MODEL] and listed[0].object == "model"
    assert server.client.models.retrieve(MODEL) == listed[0]
    with pytest.raises(openai.NotFoundError) as raised:
        server.client.models.retrieve("gpt-4o")
    assert raised.value.param == "model" and MODEL in raised.value.message


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (openai.BadRequestError, lambda client: client.chat.completions.create(**ASK, temperature=-1)),
        (openai.BadRequestError, lambda client: client.chat.completions.create(**{**ASK, "messages": []})),
        (openai.BadRequestError, lambda client: client.completions.create(model=MODEL, prompt=[])),
        (openai.BadRequestError, lambda client: client.completions.create(model=MODEL, prompt="x" * 200_000)),
        (openai.NotFoundError, lambda client: client.chat.completions.create(**{**ASK, "model": "gpt-4o"})),
        (openai.NotFoundError, lambda client: client.files.list()),
        (openai.NotFoundError, lambda client: client.moderations.create(input="x")),
        (openai.NotFoundError, lambda client: client.images.generate(prompt="x")),
    ],
)
def test_errors_are_the_clients_own_exceptions_and_whole(
    server: Served, kind: type[openai.APIStatusError], call: Call
) -> None:
    with pytest.raises(kind) as raised:
        call(server.client)
    body = raised.value.body
    assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}
    assert body["code"] == raised.value.status_code and raised.value.type == body["type"]
    assert raised.value.message.startswith("Error code:")


def test_a_wrong_key_is_an_authentication_error() -> None:
    with serving(api_key="secret", device="mock") as served:
        for key in ("wrong", "secret2"):
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                client.chat.completions.create(**ASK)
            with pytest.raises(openai.AuthenticationError):
                list(client.chat.completions.create(**ASK, stream=True))
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0)
        assert client.chat.completions.create(**ASK).choices


def test_a_fault_of_the_server_is_an_internal_server_error_and_the_server_goes_on(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> list[int]:
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.pipeline.templates, "apply", broken)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the disk is on fire"):
                server.client.chat.completions.create(**ASK, stream=stream)
    assert server.client.chat.completions.create(**ASK).choices


def test_waiting_too_long_is_a_timeout_and_the_request_is_given_up(server: Served) -> None:
    patient = server.client.with_options(timeout=0.05)
    fields: Any = {**ASK, "max_tokens": 600}
    with pytest.raises(openai.APITimeoutError):
        patient.chat.completions.create(**fields, n=8, extra_body={"ignore_eos": True})
    server.until_idle()


def test_nobody_there_is_a_connection_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(**ASK)


# ---------------------------------------------------------------- async


def test_the_async_client_asks_many_at_once_streams_and_gives_up(server: Served) -> None:
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            one = client.chat.completions.create(**ASK, temperature=0)
            answers = await asyncio.gather(
                one, *(client.chat.completions.create(**ASK, seed=k) for k in range(7))
            )
            assert all(isinstance(answer.choices[0].message.content, str) for answer in answers)
            text = ""
            async for chunk in await client.chat.completions.create(**ASK, temperature=0, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == answers[0].choices[0].message.content
            async with client.chat.completions.stream(**ASK, temperature=0) as stream:
                done = [event.content async for event in stream if event.type == "content.done"]
            assert done == [text]
            assert [model.id async for model in client.models.list()] == [MODEL]
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**ASK, n=0)
            fields: Any = {**ASK, "max_tokens": 600}
            task = asyncio.ensure_future(
                client.chat.completions.create(**fields, n=8, extra_body={"ignore_eos": True})
            )
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())
    server.until_idle()
