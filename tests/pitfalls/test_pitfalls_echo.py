"""Known pitfall: echo and logprobs. One entry a prompt and output token, the first one null, in every arrangement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pitfall_tools import Json, Served, alike, serving

URL = "/v1/completions"
PROMPT = "Once upon a time there was a fox \U0001f98a who said: h\u00e9llo!"
TOP = 2
FIELDS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


@pytest.fixture(scope="module")
def chunked() -> Iterator[Served]:
    """A server that cuts every prompt into small pieces, in pages, with the overlap loop."""
    with serving(
        max_total_tokens=2048, chunked_prefill_size=16, page_size=4, disable_overlap_schedule=False
    ) as served:
        yield served


def body(prompt: object = PROMPT, **more: object) -> Json:
    return {
        "model": "tiny-llama", "prompt": prompt, "echo": True, "logprobs": TOP, "max_tokens": 5, "temperature": 0,
        **more,
    }  # fmt: skip


def choices(server: Served, **more: object) -> list[Json]:
    answer = server.post(URL, body(**more))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def ids_of(server: Served, text: str = PROMPT) -> list[int]:
    return server.post("/v1/tokenize", {"model": "tiny-llama", "prompt": text}).json()["tokens"]


def check(choice: Json, prompt: int, output: int) -> None:
    """As many entries as tokens, nulls for the first only, and offsets that walk through the text."""
    told = choice["logprobs"]
    assert {name: len(told[name]) for name in FIELDS} == dict.fromkeys(FIELDS, prompt + output)
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert all(number <= 0 for number in told["token_logprobs"][1:])
    assert all(1 <= len(tops) <= TOP for tops in told["top_logprobs"][1:])
    offsets = told["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])
    for number, (token, offset) in enumerate(zip(told["tokens"], offsets)):
        if "\ufffd" not in token and not token.startswith(
            "<"
        ):  # parts of characters and special tokens apart
            assert choice["text"][offset : offset + len(token)] == token, number


def test_one_entry_a_token_and_the_first_is_null(server: Served) -> None:
    (choice,) = choices(server)
    assert choice["text"].startswith(PROMPT)
    check(choice, len(ids_of(server)), 5)


def test_id_prompts_say_the_same(server: Served) -> None:
    (by_text,), (by_ids,) = choices(server), choices(server, prompt=ids_of(server))
    assert alike(by_text["logprobs"], by_ids["logprobs"]) and by_text["text"] == by_ids["text"]


def test_without_new_tokens_the_prompt_alone(server: Served) -> None:
    (whole,), (none,) = choices(server), choices(server, max_tokens=0)
    prompt = len(ids_of(server))
    check(none, prompt, 0)
    assert none["text"] == PROMPT
    assert alike(none["logprobs"], {name: whole["logprobs"][name][:prompt] for name in FIELDS})


def test_a_cache_hit_says_the_same(server: Served) -> None:
    server.engine.flush_cache()
    first, second = choices(server), choices(server)
    assert alike(first, second)
    shorter, longer = choices(server, prompt=PROMPT[:20]), choices(server, prompt=PROMPT + " And more.")
    assert len(shorter[0]["logprobs"]["tokens"]) < len(first[0]["logprobs"]["tokens"])
    at = len(ids_of(server, PROMPT)) - 1  # the last token of the shorter one may be cut otherwise
    assert alike(longer[0]["logprobs"]["token_logprobs"][:at], first[0]["logprobs"]["token_logprobs"][:at])


def test_chunked_prefill_says_the_same(server: Served, chunked: Served) -> None:
    prompt = PROMPT * 3
    whole, cut = choices(server, prompt=prompt), choices(chunked, prompt=prompt)
    assert len(ids_of(server, prompt)) > 48
    check(cut[0], len(ids_of(server, prompt)), 5)
    assert alike(whole, cut) and alike(cut, choices(chunked, prompt=prompt))
    chunked.assert_empty()


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("stream_interval", [1, 3])
def test_streamed_it_is_the_same_list(server: Served, max_tokens: int, stream_interval: int) -> None:
    more: dict[str, Any] = {"max_tokens": max_tokens, "stream_interval": stream_interval}
    (whole,) = choices(server, **more)
    parts = [chunk["choices"][0] for chunk in server.chunks(URL, body(**more)) if chunk["choices"]]
    told = [part["logprobs"] for part in parts if part["logprobs"]]
    joined = {name: [entry for part in told for entry in part[name]] for name in FIELDS}
    assert alike(joined, whole["logprobs"])
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert len(told[0]["tokens"]) == len(ids_of(server)) and parts[0]["text"] == PROMPT


def test_each_choice_of_several_prompts_has_its_own(server: Served) -> None:
    prompts = [PROMPT, "Short."]
    found = choices(server, prompt=prompts, n=2, temperature=1.0, seed=3)
    alone = [choices(server, prompt=prompt)[0] for prompt in prompts]
    assert len(found) == 4
    for index, choice in enumerate(found):
        prompt = prompts[index // 2]
        length = len(ids_of(server, prompt))
        check(choice, length, len(choice["logprobs"]["tokens"]) - length)
        expected = alone[index // 2]["logprobs"]
        assert alike(
            {name: choice["logprobs"][name][:length] for name in FIELDS},
            {name: expected[name][:length] for name in FIELDS},
        )


def test_echo_without_logprobs_and_logprobs_without_echo(server: Served) -> None:
    (choice,) = choices(server, logprobs=None)
    assert choice["logprobs"] is None and choice["text"].startswith(PROMPT)
    (choice,) = choices(server, echo=False)
    assert len(choice["logprobs"]["tokens"]) == 5 and choice["logprobs"]["text_offset"][0] == 0
    (choice,) = choices(server, logprobs=0)
    assert choice["logprobs"]["top_logprobs"] is None and choice["logprobs"]["token_logprobs"][0] is None


def test_special_tokens_take_no_place_in_a_text_without_them(server: Served) -> None:
    ids = [1, *ids_of(server, "fox"), 2]
    (shown,) = choices(server, prompt=ids, skip_special_tokens=False, max_tokens=0)
    (hidden,) = choices(server, prompt=ids, max_tokens=0)
    assert shown["text"].startswith("<") and hidden["text"] == "fox"
    assert hidden["logprobs"]["text_offset"][:2] == [0, 0] and hidden["logprobs"]["text_offset"][-1] == 3
    assert shown["logprobs"]["text_offset"][1] == len(shown["logprobs"]["tokens"][0])
    assert shown["logprobs"]["token_logprobs"][1:] == pytest.approx(
        hidden["logprobs"]["token_logprobs"][1:], abs=1e-4
    )
