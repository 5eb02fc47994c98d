"""The official client's chat: whole answers, streams, raw responses, and what it checks of their shapes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pitfall_tools import MODEL, VOCAB, Served

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12}


def test_a_whole_answer_has_every_field_of_the_clients_type(server: Served) -> None:
    answer = server.client.chat.completions.create(**ASK, temperature=0)
    assert isinstance(answer, ChatCompletion)
    ChatCompletion.model_validate(answer.to_dict(), strict=True)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content and choice.message.tool_calls is None and choice.logprobs is None


def test_chunks_have_every_field_and_join_to_the_whole_answer(server: Served) -> None:
    whole = server.client.chat.completions.create(**ASK, temperature=0)
    options: Any = {"include_usage": True}
    chunks = list(
        server.client.chat.completions.create(**ASK, temperature=0, stream=True, stream_options=options)
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content


def test_several_choices_with_logprobs(server: Served) -> None:
    answer = server.client.chat.completions.create(**ASK, n=3, seed=7, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(answer.to_dict(), strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert 1 <= len(choice.logprobs.content) <= 12
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0.0 and len(entry.top_logprobs) >= 2
            assert entry.bytes == list(entry.token.encode()) or "\ufffd" in entry.token
    again = server.client.chat.completions.create(**ASK, n=3, seed=7)
    assert [each.message.content for each in again.choices] == [
        each.message.content for each in answer.choices
    ]


def test_every_parameter_of_the_client_that_names_a_limit_or_a_choice_is_taken(server: Served) -> None:
    fields: Any = {key: value for key, value in ASK.items() if key != "max_tokens"}
    answer = server.client.chat.completions.create(
        **fields,
        max_completion_tokens=5,
        temperature=0.7,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"5": -100, str(VOCAB - 1): 1},
        stop=["\n\n", "zzz"],
        seed=3,
        user="someone",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="low",
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 5


def test_the_raw_response_is_there(server: Served) -> None:
    raw = server.client.chat.completions.with_raw_response.create(**ASK, temperature=0)
    assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
    assert int(raw.headers["content-length"]) == len(raw.content)
    parsed = raw.parse()
    assert parsed.to_dict() == json.loads(raw.content)


def test_a_streamed_raw_response_is_server_sent_events(server: Served) -> None:
    create = server.client.chat.completions.with_streaming_response.create
    with create(**ASK, temperature=0, stream=True) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers.get("content-length") is None
        body = b"".join(raw.iter_bytes()).decode()
    events = body.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in part or part["usage"] is None for part in parts)
    assert sum(part["choices"][0]["finish_reason"] is not None for part in parts) == 1


def test_a_stream_that_is_closed_early_leaves_nothing(server: Served) -> None:
    fields: Any = {**ASK, "max_tokens": 400}
    stream = server.client.chat.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    server.until_idle()


def test_the_streaming_helper_tells_deltas_and_the_done_content(server: Served) -> None:
    whole = server.client.chat.completions.create(**ASK, temperature=0).choices[0].message.content
    deltas, done, chunks = [], [], 0
    with server.client.chat.completions.stream(**ASK, temperature=0) as stream:
        for event in stream:
            if event.type == "content.delta":
                deltas.append(event.delta)
                assert event.snapshot == "".join(deltas)
            elif event.type == "content.done":
                done.append(event.content)
            chunks += event.type == "chunk"
        with pytest.raises(openai.LengthFinishReasonError) as raised:
            stream.get_final_completion()  # the client parses no answer that was cut off
    assert "".join(deltas) == whole == raised.value.completion.choices[0].message.content and done == [whole]
    assert chunks >= len(deltas)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
        [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Hi."},
        ],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]},
        ],
    ],
)
def test_developers_and_content_parts_are_the_prompt_of_plain_text(server: Served, messages: Any) -> None:
    plain: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    texts = []
    for each in (plain, messages):
        answer = server.client.chat.completions.create(
            model=MODEL, messages=each, max_tokens=8, temperature=0
        )
        texts.append((answer.choices[0].message.content, answer.usage and answer.usage.prompt_tokens))
    assert texts[0] == texts[1]


def test_an_assistants_beginning_is_gone_on_with(server: Served) -> None:
    """continue_final_message: what the assistant has said already is the end of the prompt, not a turn of its own."""
    begun = "One, two,"
    turns: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]
    fields: Any = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 8,
        "extra_body": {"continue_final_message": True},
    }
    rest = server.client.chat.completions.create(**fields, messages=turns)
    pipeline = server.engine.pipeline
    ids = pipeline.templates.apply(turns[:1], add_generation_prompt=True)
    ids += pipeline.tokenizer.encode(begun, add_special_tokens=False)
    expected = server.generate(ids, params={"max_new_tokens": 8, "ignore_eos": False})
    assert rest.choices[0].message.content == expected["text"]
    assert rest.usage is not None and rest.usage.prompt_tokens == len(ids)
    with pytest.raises(openai.BadRequestError, match="last message of the assistant"):
        server.client.chat.completions.create(**fields, messages=turns[:1])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "1"}},
        {"type": "poem", "text": "x"},
    ],
)
def test_a_content_part_that_is_no_text_is_refused_by_its_place(server: Served, part: Any) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(openai.BadRequestError) as raised:
        server.client.chat.completions.create(model=MODEL, messages=messages)
    assert str(raised.value.param).startswith("messages[0].content[1]")
