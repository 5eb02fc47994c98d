"""Log-probabilities by /generate and Engine.generate: names, shapes, streams, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pitfall_tools import VOCAB, Json, Served, alike

IDS = [5, 9, 17, 33, 65, 129, 8, 12]
ASKED: Json = {
    "return_logprob": True,
    "logprob_start_len": 2,
    "top_logprobs_num": 3,
    "token_ids_logprob": [4, 200],
}


def meta(server: Served, prompt: Any = IDS, params: Json | None = None, **more: Any) -> Json:
    answer = server.generate(prompt, params=params, **{**ASKED, **more})
    return answer["meta_info"]


def test_names_and_shapes(server: Served) -> None:
    found = meta(server, params={"max_new_tokens": 3})
    assert [entry[1:] for entry in found["input_token_logprobs"]] == [[token, None] for token in IDS[2:]]
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert len(found[name]) == 6
    assert found["input_token_logprobs"][0][0] is None
    assert found["input_top_logprobs"][0] is found["input_token_ids_logprobs"][0] is None
    for name, width in (("input_top_logprobs", 3), ("input_token_ids_logprobs", 2)):
        assert [len(entry) for entry in found[name][1:]] == [width] * 5
    assert [[token for _, token, _ in entry] for entry in found["output_token_ids_logprobs"]] == [
        [4, 200]
    ] * 3
    assert found["output_token_logprobs_length"] == len(found["output_token_logprobs"]) == 3


def test_minus_one_is_none_and_the_end_is_none(server: Served) -> None:
    for start in (-1, len(IDS), None):
        found = meta(server, logprob_start_len=start)
        assert found["input_token_logprobs"] == found["input_top_logprobs"] == []
        assert len(found["output_token_logprobs"]) == 16


def test_the_likelihoods_at_a_position_sum_to_one(server: Served) -> None:
    found = meta(
        server, top_logprobs_num=VOCAB, token_ids_logprob=list(range(VOCAB)), params={"max_new_tokens": 1}
    )
    rows = [*found["input_top_logprobs"][1:], *found["output_top_logprobs"]]
    for top in rows:
        assert sum(math.exp(value) for value, _, _ in top) == pytest.approx(1.0, abs=1e-4)
    for top, chosen in zip(
        rows, [*found["input_token_ids_logprobs"][1:], *found["output_token_ids_logprobs"]]
    ):
        assert {token: value for value, token, _ in top} == {token: value for value, token, _ in chosen}


def test_scores_of_what_could_come_next_need_no_new_token(server: Served) -> None:
    none = meta(server, params={"max_new_tokens": 0}, logprob_start_len=-1)
    one = meta(server, params={"max_new_tokens": 1}, logprob_start_len=-1)
    assert none["output_token_logprobs"] == [] and len(none["output_token_ids_logprobs"]) == 1
    assert alike(none["output_token_ids_logprobs"], one["output_token_ids_logprobs"])


def test_streamed_and_whole_are_the_same(server: Served) -> None:
    body = {
        "input_ids": IDS,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        **ASKED,
    }
    whole = server.post("/generate", body).json()["meta_info"]
    chunks = server.chunks("/generate", body)
    names = [name for name in whole if "logprobs" in name]
    assert len(names) == 7
    assert alike(
        {name: whole[name] for name in names}, {name: chunks[-1]["meta_info"][name] for name in names}
    )
    assert all(len(chunk["meta_info"]["input_token_logprobs"]) == 6 for chunk in chunks)


def test_from_python_it_is_the_same(server: Served) -> None:
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    mine = server.engine.generate(input_ids=IDS, sampling_params=params, **ASKED)["meta_info"]
    theirs = meta(server, params=params)
    for name in ("input_token_logprobs", "input_top_logprobs", "output_token_ids_logprobs"):
        assert alike([_lists(entry) for entry in mine[name]], theirs[name])


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def test_a_list_for_each_prompt_of_a_batch(server: Served) -> None:
    body = {
        "input_ids": [IDS, IDS[:4], IDS[:3]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 2},
        "return_logprob": [True, True, False],
        "logprob_start_len": [6, -1, 0],
        "token_ids_logprob": [[4], None, [5]],
    }
    first, second, third = (each["meta_info"] for each in server.post("/generate", body).json())
    assert len(first["input_token_logprobs"]) == 2 and len(first["output_token_ids_logprobs"][0]) == 1
    assert second["input_token_logprobs"] == [] and "output_token_ids_logprobs" not in second
    assert "input_token_logprobs" not in third


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"logprob_start_len": 9}, "logprob_start_len", "the prompt's 8 tokens, got 9"),
        ({"logprob_start_len": -2}, "logprob_start_len", "between -1"),
        ({"logprob_start_len": [0]}, "logprob_start_len", "must not be a list"),
        ({"logprob_start_len": 0.5}, "logprob_start_len", "expected `int"),
        ({"token_ids_logprob": [VOCAB]}, "token_ids_logprob", f"outside the vocabulary (0 to {VOCAB - 1})"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob", "token id -1"),
        ({"token_ids_logprob": ["a"]}, "token_ids_logprob", "list of integers"),
        ({"token_ids_logprob": [[1], [2]]}, "token_ids_logprob", "one prompt, which takes a flat list"),
        ({"token_ids_logprob": [1] * (VOCAB + 1)}, "token_ids_logprob", f"at most {VOCAB}"),
    ],
)
def test_what_is_refused(server: Served, more: Json, param: str, said: str) -> None:
    answer = server.post("/generate", {"input_ids": IDS, **ASKED, **more})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and said in error["message"], error
