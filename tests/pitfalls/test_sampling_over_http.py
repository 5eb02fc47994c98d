"""Sampling through the served pipeline with the openai client: seeds, penalties, minimum lengths and logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pitfall_tools import TOLERANCE, VOCAB, Served, alike, serving

SEEDED = {"temperature": 1.0, "max_tokens": 24, "seed": 77, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module", params=["normal", "overlap"])
def both(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A served engine of either loop, small enough that the crowd below has to queue."""
    with serving(event_loop=request.param, max_total_tokens=1500, chunked_prefill_size=64) as served:
        yield served


@pytest.fixture
def server(both: Served) -> Iterator[Served]:
    yield both
    both.assert_empty()


def tokens_of(choice: Any) -> list[str]:
    return [entry.token for entry in choice.logprobs.content]


def crowd(server: Served, number: int) -> Any:
    """One of many other requests, of all kinds."""
    extra = {"ignore_eos": True, "top_k": 20 + number, "repetition_penalty": 1.1 if number % 3 else 1.0}
    return server.chat(
        f"crowd {number} " * (1 + number % 5),
        temperature=0.2 * (number % 8),
        max_tokens=5 + number,
        seed=number,
        frequency_penalty=0.5 * (number % 2),
        logit_bias={str(10 + number): 5.0},
        n=1 + (number % 9 == 0),
        extra_body=extra,
    )


def test_a_seed_decides_alone_whatever_shares_the_batch(server: Served) -> None:
    ask = {**SEEDED, "logprobs": True, "top_logprobs": 5}
    alone = server.chat("deterministic?", **ask).choices[0]
    with ThreadPoolExecutor(40) as pool:
        others = [pool.submit(crowd, server, number) for number in range(32)]
        among = [pool.submit(server.chat, "deterministic?", **ask) for _ in range(3)]
        for future in among:
            found = future.result().choices[0]
            assert found.message.content == alone.message.content and tokens_of(found) == tokens_of(alone)
            for one, other in zip(found.logprobs.content, alone.logprobs.content, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert all(future.result().choices for future in others)
    other_seed = server.chat("deterministic?", **{**ask, "seed": 78}).choices[0]
    assert tokens_of(other_seed) != tokens_of(alone)


def test_the_samples_of_a_seed_differ_and_come_again(server: Served) -> None:
    first, again = (server.chat("several", **SEEDED, n=5).choices for _ in range(2))
    texts = [choice.message.content for choice in first]
    assert len(set(texts)) == 5 and texts == [choice.message.content for choice in again]
    # sample i is what the seed + i gives
    for index in (0, 3):
        single = server.chat("several", **{**SEEDED, "seed": 77 + index})
        assert single.choices[0].message.content == texts[index]
    parts: dict[int, str] = dict.fromkeys(range(5), "")
    for chunk in server.chat("several", **SEEDED, n=5, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == texts


def test_greedy_has_several_names(server: Served) -> None:
    answers = [
        server.complete("greedy", max_tokens=12, **ask).choices[0].text
        for ask in (
            {"temperature": 0},
            {"temperature": 1.3, "extra_body": {"top_k": 1}},
            {"temperature": 1e-7},
        )
    ]
    assert len(set(answers)) == 1


@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
@pytest.mark.parametrize("interval", [1, 4])
def test_streamed_logprobs_equal_the_others_in_every_shape(server: Served, kind: str, interval: int) -> None:
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True,
                                          "top_logprobs": 2, "max_tokens": 18, "seed": 5}),
        "completions": ("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 18, "seed": 5}),
        "generate": ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 2,
                                   "sampling_params": {"max_new_tokens": 18, "sampling_seed": 5,
                                                       "ignore_eos": True, "stream_interval": interval}}),
    }[kind]  # fmt: skip
    if kind != "generate":
        body |= {"stream_interval": interval, "ignore_eos": True}
    whole = server.post(path, body).json()
    chunks = server.chunks(path, body)
    if kind == "generate":
        meta, last = whole["meta_info"], chunks[-1]["meta_info"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert alike(last[name], meta[name]) and len(meta[name]) == 18
        lengths = [chunk["meta_info"]["output_token_logprobs_length"] for chunk in chunks]
        assert lengths == [len(chunk["output_ids"]) for chunk in chunks] and lengths == sorted(lengths)
        return
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    name = "content" if kind == "chat" else "token_logprobs"
    assert alike([item for part in parts for item in part[name]], whole["choices"][0]["logprobs"][name])


def test_the_three_shapes_tell_the_same_numbers(server: Served) -> None:
    prompt = server.engine.pipeline.tokenizer.apply_chat_template([{"role": "user", "content": "same"}], True)
    chat = server.chat("same", temperature=0, max_tokens=9, logprobs=True, top_logprobs=3).choices[0].logprobs
    text = server.complete(prompt, temperature=0, max_tokens=9, logprobs=3).choices[0].logprobs
    native = server.generate(
        prompt,
        params={"max_new_tokens": 9, "ignore_eos": False},
        return_logprob=True,
        top_logprobs_num=3,
        return_text_in_logprobs=True,
    )["meta_info"]
    numbers = [logprob for logprob, _, _ in native["output_token_logprobs"]]
    assert [entry.logprob for entry in chat.content] == pytest.approx(numbers, abs=TOLERANCE)
    assert text.token_logprobs == pytest.approx(numbers, abs=TOLERANCE)
    assert [entry.token for entry in chat.content] == text.tokens
    assert text.tokens == [token for _, _, token in native["output_token_logprobs"]]
    for entry, tops in zip(chat.content, native["output_top_logprobs"], strict=True):
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the likeliest"
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            top.logprob for top in entry.top_logprobs
        )[::-1]
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + TOLERANCE
        assert [top.token for top in entry.top_logprobs] == [token for _, _, token in tops]


def distribution(server: Served, forced: list[int], **params: Any) -> dict[int, float]:
    """The logprob of every id after the prompt and these outputs, which are forced one by one."""
    bias = {str(forced[0]): 100.0}
    out = server.generate(
        "penalised",
        params={"max_new_tokens": len(forced) + 1, "logit_bias": bias, **params},
        return_logprob=True,
        top_logprobs_num=VOCAB,
    )
    assert out["output_ids"][: len(forced)] == forced
    return {token: logprob for logprob, token, _ in out["meta_info"]["output_top_logprobs"][-1]}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("penalty", "per_time", "once"),
    [({"frequency_penalty": 0.75}, 0.75, 0.0), ({"presence_penalty": 1.25}, 0.0, 1.25)],
)
def test_penalties_lower_what_was_said_by_the_stated_amount(
    server: Served, penalty: dict[str, float], per_time: float, once: float, times: int
) -> None:
    said = 50
    plain = distribution(server, [said] * times)
    lowered = distribution(server, [said] * times, **penalty)
    for token in plain:
        change = (lowered[token] - lowered[99]) - (plain[token] - plain[99])
        expected = -(per_time * times + once) if token == said else 0.0
        assert change == pytest.approx(expected, abs=5e-4), token


def test_repetition_penalty_makes_a_difference_only_to_what_was_said(server: Served) -> None:
    said = 50
    plain, lowered = (
        distribution(server, [said] * 2),
        distribution(server, [said] * 2, repetition_penalty=1.9),
    )
    changes = {t: (lowered[t] - lowered[99]) - (plain[t] - plain[99]) for t in plain}
    assert {t for t, change in changes.items() if abs(change) > 5e-4} == {said} and changes[said] < 0


def test_penalties_of_openai_bodies_reach_the_sampler(server: Served) -> None:
    """With the largest penalties a loop of one token is broken; without them it goes on."""
    ask = {"temperature": 0, "max_tokens": 30, "logit_bias": {"60": 4}}
    plain = server.complete("loop", **ask).choices[0].text
    broken = server.complete("loop", **ask, frequency_penalty=2.0, presence_penalty=2.0).choices[0].text
    stronger = server.complete("loop", **ask, extra_body={"repetition_penalty": 2.0}).choices[0].text
    assert plain != broken and plain != stronger


def test_min_tokens_bars_every_stop_token_until_then(server: Served) -> None:
    first = server.generate("minimum", params={"max_new_tokens": 1})["output_ids"][0]
    ask = {"temperature": 0, "max_tokens": 20, "stop_token_ids": [first]}
    short = server.post("/v1/completions", {"prompt": "minimum", **ask}).json()
    assert short["usage"]["completion_tokens"] == 1 and short["choices"][0]["matched_stop"] == first
    for least in (3, 8):
        later = server.post("/v1/completions", {"prompt": "minimum", **ask, "min_tokens": least}).json()
        assert later["usage"]["completion_tokens"] >= least
    params = {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [first], "min_new_tokens": 8}
    ids = server.post("/generate", {"text": "minimum", "sampling_params": params}).json()["output_ids"]
    assert first not in ids[:8] and 2 not in ids[:8]


def test_tokenize_and_detokenize_are_inverse(server: Served) -> None:
    text = "Round trip: é漢 and more"
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"text": text}
    many = server.post("/v1/tokenize", {"prompt": ["a", text], "add_special_tokens": False}).json()
    assert many["tokens"][1] == tokens["tokens"] and many["count"][1] == tokens["count"]
    assert server.post("/v1/detokenize", {"tokens": many["tokens"]}).json()["text"] == ["a", text]
    for wrong in ([VOCAB], [-1], ["a"], [[1], [VOCAB]]):
        assert server.post("/detokenize", {"tokens": wrong}).status_code == 400
