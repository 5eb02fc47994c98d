"""Faults of the OpenAI protocol that public servers really had, each as a requirement on the served pipeline."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from forced_model import ASK, forced_model
from pitfall_tools import MODEL, VOCAB, Served, alike, folded

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "model": MODEL}
FREE = {"temperature": 1.5, "ignore_eos": True, "model": MODEL}


def body(path: str, **more: Any) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "hello"}]}
        if path == CHAT
        else {"prompt": "Once upon a time"}
    )
    return {**GREEDY, **prompt, **more}


def texts(answer: dict[str, Any]) -> list[str]:
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in answer["choices"]
    ]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_comes_in_one_extra_chunk_and_only_if_asked_for(server: Served, path: str, n: int) -> None:
    """With include_usage exactly one more chunk, the last, without choices and with the whole usage, the prompt
    counted once; without it no such chunk. sgl-project/sglang#954, BerriAI/litellm#28735, ROCm/ATOM#1711
    """
    whole = server.post(path, body(path, n=n)).json()["usage"]
    assert whole["completion_tokens"] == 16 * n and whole["total_tokens"] == whole["prompt_tokens"] + 16 * n
    chunks = server.chunks(path, body(path, n=n, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks[:-1])
    plain = server.chunks(path, body(path, n=n))
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in plain)
    single = server.post(path, body(path)).json()["usage"]
    assert whole["prompt_tokens"] == single["prompt_tokens"]


@pytest.mark.parametrize("limit", [16, 1, 0])
def test_a_chat_stream_has_one_role_one_finish_and_one_done(server: Served, limit: int) -> None:
    """For every choice one role, first and even without text, one finish_reason and nothing after it, then a single
    [DONE]. sgl-project/sglang#8417, ollama/ollama#7626, ModelTC/LightLLM#1262, ai-dynamo/dynamo#12741
    """
    chunks = server.chunks(CHAT, body(CHAT, n=2, max_tokens=limit))
    choices = folded(chunks)
    assert set(choices) == {0, 1}
    for index, choice in choices.items():
        assert (choice.role, choice.finishes, choice.after_finish) == (1, 1, 0)
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "length"
        assert bool(choice.text) == (limit > 0)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_over_several_tokens_is_cut_with_no_piece_sent(server: Served, path: str) -> None:
    """Text up to the match, no piece of the match streamed, streamed and not equal. sgl-project/sglang#11462,
    vllm-project/vllm#3574, huggingface/text-generation-inference#1039, lm-sys/FastChat#3891
    """
    asked = body(path, max_tokens=48, temperature=1.5, seed=4)
    (whole,) = texts(server.post(path, asked).json())
    cuts = [at for at in range(8, len(whole) - 4) if "\ufffd" not in whole[at : at + 4]]
    assert len(cuts) > 5
    for at in cuts[:: max(1, len(cuts) // 5)]:
        stop = whole[at : at + 4]
        answer = server.post(path, {**asked, "stop": [stop]}).json()
        assert texts(answer) == [whole[: whole.index(stop)]]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["matched_stop"] == stop
        choice = folded(server.chunks(path, {**asked, "stop": [stop]}))[0]
        assert (choice.text, choice.finish) == (whole[: whole.index(stop)], "stop")


def test_a_stop_string_that_is_begun_but_never_completed_is_delivered(server: Served) -> None:
    """What was withheld because it might become a stop string still arrives, wherever the answer ends.
    huggingface/text-generation-inference#1724, sgl-project/sglang#11462
    """
    for tokens in (5, 9, 14, 20):
        asked = body(TEXT, max_tokens=tokens, temperature=1.5, seed=11)
        (whole,) = texts(server.post(TEXT, asked).json())
        stop = whole[-3:] + "never to come"
        choice = folded(server.chunks(TEXT, {**asked, "stop": [stop, whole[:2] + "nor this"]}))[0]
        assert (choice.text, choice.finish) == (whole, "length")
        assert texts(server.post(TEXT, {**asked, "stop": [stop]}).json()) == [whole]


@pytest.mark.parametrize("interval", [1, 7])
def test_a_character_of_several_tokens_is_sent_whole(server: Served, interval: int) -> None:
    """No half character is ever sent, and the joined stream is the decoding of all ids. ggml-org/llama.cpp#4446,
    waybarrios/vllm-mlx#109, exo-explore/exo#1691
    """
    decode = server.engine.pipeline.tokenizer.decode
    foreign = 0
    for seed in range(12):
        params = {
            "temperature": 1.5,
            "max_new_tokens": 80,
            "sampling_seed": seed,
            "stream_interval": interval,
        }
        whole = server.generate("some words", params=params)
        pieces = server.chunks(
            "/generate", {"text": "some words", "sampling_params": {**params, "ignore_eos": True}}
        )
        assert pieces[-1]["output_ids"] == whole["output_ids"] and pieces[-1]["text"] == whole["text"]
        assert whole["text"] == decode(whole["output_ids"])
        assert all(later["text"].startswith(piece["text"]) for piece, later in pairwise(pieces))
        foreign += sum(ord(char) > 127 and char != "\ufffd" for char in whole["text"])
    assert foreign > 5, "no answer held a character of several tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_starts_where_the_prompt_ends(server: Served, stream: bool) -> None:
    """decode(prompt + output) minus the prompt: a leading space stays, nothing of the prompt comes again, even if it
    ends in half a character. vllm-project/vllm#48853, huggingface/transformers#28776, ml-explore/mlx-lm#1754
    """
    tokenizer = server.engine.pipeline.tokenizer
    two, three = tokenizer.encode("é"), tokenizer.encode("漢")
    assert len(two) == 2 and len(three) == 3, "these characters must take several tokens"
    space = tokenizer.encode(" w")[0]
    cases = [
        (tokenizer.encode("word") + two[:1], two[1], "é"),
        (tokenizer.encode("word") + three[:2], three[2], "漢"),
        (tokenizer.encode("word"), space, tokenizer.decode([space])),
    ]
    for prompt, forced, expected in cases:
        params = {"max_new_tokens": 1, "logit_bias": {str(forced): 100}, "temperature": 0}
        asked = {"input_ids": prompt, "sampling_params": params}
        text = (
            server.chunks("/generate", asked)[-1]["text"]
            if stream
            else server.post("/generate", asked).json()["text"]
        )
        assert text == expected
    assert expected.startswith(" ")


def test_limits_zero_null_and_the_newer_name(server: Served) -> None:
    """0 is honoured, null is absent, max_completion_tokens wins, and the limit shows as finish_reason length.
    sgl-project/sglang#12589, sgl-project/sglang#3531, huggingface/text-generation-inference#2925,
    ikawrakow/ik_llama.cpp#2321
    """
    nothing = server.post(CHAT, body(CHAT, max_tokens=0)).json()
    assert texts(nothing) == [""] and nothing["usage"]["completion_tokens"] == 0
    assert nothing["choices"][0]["finish_reason"] == "length"
    newer = server.post(CHAT, body(CHAT, max_tokens=9, max_completion_tokens=3)).json()
    assert newer["usage"]["completion_tokens"] == 3
    older = server.post(CHAT, body(CHAT, max_tokens=4, max_completion_tokens=None)).json()
    assert older["usage"]["completion_tokens"] == 4
    for field in ({"max_tokens": None}, {}):
        asked = {"model": MODEL, "prompt": "x", "temperature": 0, "ignore_eos": True, **field}
        assert server.post(TEXT, asked).json()["usage"]["completion_tokens"] == 16
    open_end = {**body(CHAT, max_tokens=None), "stop_token_ids": list(range(4, VOCAB)), "ignore_eos": False}
    assert server.post(CHAT, open_end).json()["choices"][0]["finish_reason"] == "stop"


def test_content_as_parts_null_or_absent_gives_the_same_prompt(server: Served) -> None:
    """A list of text parts is the plain string; null (with tool_calls) and absent add nothing, above all no "None".
    vllm-project/vllm#9358, PrimeIntellect-ai/renderers#134, mistralai/mistral-common#324,
    cubist38/mlx-openai-server#205
    """

    def answer(*messages: dict[str, Any]) -> tuple[list[str], int]:
        reply = server.post(CHAT, {**GREEDY, "messages": list(messages)}).json()
        return texts(reply), reply["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    plain = answer({"role": "user", "content": "two parts"})
    assert answer({"role": "user", "content": parts}) == plain
    ask, again = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    call = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    empty = answer(ask, {"role": "assistant", "content": "", "tool_calls": call}, again)
    assert answer(ask, {"role": "assistant", "content": None, "tool_calls": call}, again) == empty
    assert answer(ask, {"role": "assistant", "tool_calls": call}, again) == empty
    assert answer(ask, {"role": "assistant", "content": "None", "tool_calls": call}, again)[1] > empty[1]


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_every_prompt_comes_once(server: Served, stream: bool) -> None:
    """index = prompt_no * n + sample_no, each once, with prompt and cached tokens counted once a prompt.
    vllm-project/vllm#52399, sgl-project/sglang#12814, sgl-project/sglang#1134
    """
    prompts = ["one", "two and more", "three and much more"]
    asked = {**GREEDY, "prompt": prompts, "n": 2}
    singles = [server.post(TEXT, {**GREEDY, "prompt": prompt}).json() for prompt in prompts]
    expected = {2 * i + sample: texts(single)[0] for i, single in enumerate(singles) for sample in range(2)}
    if stream:
        chunks = server.chunks(TEXT, {**asked, "stream_options": {"include_usage": True}})
        found = {index: choice.text for index, choice in folded(chunks).items()}
        usage = chunks[-1]["usage"]
    else:
        answer = server.post(TEXT, asked).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        found, usage = dict(enumerate(texts(answer))), answer["usage"]
    assert found == expected
    assert usage["prompt_tokens"] == sum(single["usage"]["prompt_tokens"] for single in singles)
    assert usage["completion_tokens"] == 6 * 16


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streamed_logprobs_are_the_unstreamed_ones(server: Served, path: str, interval: int) -> None:
    """One entry a token with its own alternatives, however many tokens share a chunk. sgl-project/sglang#5761,
    sgl-project/sglang#39260, sgl-project/sglang#2088
    """
    wish = {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    asked = body(path, max_tokens=21, seed=3, temperature=1.2, **wish)
    whole = server.post(path, asked).json()["choices"][0]["logprobs"]
    chunks = server.chunks(path, {**asked, "stream_interval": interval})
    parts = [part for chunk in chunks for choice in chunk["choices"] if (part := choice["logprobs"])]
    if path == CHAT:
        entries = [entry for part in parts for entry in part["content"]]
        assert alike(entries, whole["content"]) and len(entries) == 21
        for entry in entries:
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] + 1e-4
    else:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert alike([item for part in parts for item in part[name]], whole[name])
            assert len(whole[name]) == 21
    assert len(parts) <= (21 if interval == 1 else 5), "tokens that come together share a chunk"


def test_logit_bias_is_checked_and_acts_on_its_own_request_only(server: Served) -> None:
    """An unknown id is 400; a valid bias holds for its request's whole length while others come and go beside it.
    sgl-project/sglang#7670, vllm-project/vllm#16529, sgl-project/sglang#6171, sgl-project/sglang#3059
    """
    for wrong in ({"999999": 1}, {"x": 1}, {"-1": 1}, {"5": 101}):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="logit_bias"):
                server.complete(logit_bias=wrong, stream=stream)
    greedy = {"temperature": 0, "ignore_eos": True}
    prompts = [[number + 4] * 9 for number in range(8)]
    alone = [server.generate(ids, params={"max_new_tokens": 10 + 3 * i}) for i, ids in enumerate(prompts)]
    biases = {2: 77, 5: 201}
    params = [
        {
            **greedy,
            "max_new_tokens": 10 + 3 * i,
            **({"logit_bias": {str(biases[i]): 100}} if i in biases else {}),
        }
        for i in range(len(prompts))
    ]
    together = server.post("/generate", {"input_ids": prompts, "sampling_params": params}).json()
    for i, out in enumerate(together):
        expected = [biases[i]] * (10 + 3 * i) if i in biases else alone[i]["output_ids"]
        assert out["output_ids"] == expected
    banned = alone[0]["output_ids"][0]
    out = server.generate(prompts[0], params={"max_new_tokens": 30, "logit_bias": {str(banned): -100}})
    assert banned not in out["output_ids"]


def test_line_ends_of_unicode_in_a_text_do_not_end_a_line_of_the_stream() -> None:
    """Many a client splits the stream where Python's splitlines does: found by a soak of our own."""
    said = "one\u2028two\u2029three\x85four"
    with forced_model() as model:
        model.says(said)
        stream = {**ASK, "stream": True, "temperature": 0}
        raw = model.served.post(CHAT, stream).content.decode()
        events = [line for line in raw.splitlines() if line]
        assert all(line.startswith("data: ") for line in events) and events[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in events[:-1]]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == said
