"""What may be asked of log-probabilities: shapes for one prompt and for many, limits, names of processors."""

from __future__ import annotations

import pytest

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput
from sgviz.messages.logprob_start import MAX_INPUT_ENTRIES
from sgviz.messages.session import SessionParams
from sgviz.tokenizer_manager.asked_logprobs import check_processor, spread_token_ids, start_of


def one(start: int, tops: int = 0, ids: list[int] | None = None) -> GenerateReqInput:
    return GenerateReqInput(logprob_start_len=start, top_logprobs_num=tops, token_ids_logprob=ids)


def test_a_flat_list_is_for_every_prompt_and_lists_are_for_one_each() -> None:
    assert spread_token_ids([1, 2], None, 10) == [[1, 2]]
    assert spread_token_ids([1, 2], 3, 10) == [[1, 2]] * 3
    assert spread_token_ids([[1], None, []], 3, 10) == [[1], None, None]
    assert spread_token_ids(None, 2, 10) == spread_token_ids([], 2, 10) == [None, None]


@pytest.mark.parametrize(
    ("value", "size"), [([[1]], None), ([[1]], 2), ([10], None), ([True], None), ([[1.5]], 1), ("ab", None)]
)
def test_other_shapes_are_refused(value: object, size: int | None) -> None:
    with pytest.raises(BadRequest) as caught:
        spread_token_ids(value, size, 10)  # type: ignore[arg-type]
    assert caught.value.param == "token_ids_logprob"


def test_the_end_of_the_prompt_means_none_and_beyond_it_is_refused() -> None:
    assert [start_of(one(start), 5) for start in (-1, 0, 4, 5)] == [-1, 0, 4, -1]
    for start in (-2, 6):
        with pytest.raises(BadRequest, match="the prompt's 5 tokens"):
            start_of(one(start), 5)


def test_of_a_turn_the_place_is_left_to_who_knows_the_whole_prompt() -> None:
    turn = {"session_params": SessionParams(id="s"), "top_logprobs_num": 0}
    for start in (-1, 0, 2, 50, 2**31 - 1):
        assert start_of(GenerateReqInput(logprob_start_len=start, **turn), 2) == start
    for start in (-2, 2**31, True, 1.0):
        with pytest.raises(BadRequest, match="logprob_start_len must be between -1"):
            start_of(GenerateReqInput(logprob_start_len=start, **turn), 2)  # type: ignore[arg-type]


def test_an_answer_of_millions_of_numbers_is_refused() -> None:
    tops = MAX_INPUT_ENTRIES // 1000 - 1
    assert start_of(one(0, tops), 1000) == 0
    with pytest.raises(BadRequest, match=f"at most {MAX_INPUT_ENTRIES} are given"):
        start_of(one(0, tops, [1]), 1000)
    assert start_of(one(-1, tops, [1]), 1000) == -1


def test_an_unknown_processor_is_told_which_there_are() -> None:
    check_processor(None, ())
    check_processor("a", ("a", "b"))
    with pytest.raises(BadRequest, match=r"did you mean 'only'.*there are only, other") as caught:
        check_processor("onyl", ("only", "other"))
    assert caught.value.param == "custom_logit_processor"
    with pytest.raises(BadRequest, match="names none"):
        check_processor("a", ())
