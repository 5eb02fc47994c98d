"""Where the two sides of a request meet: one set of fields an answer, and each wrong one refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from sgviz.errors import BadRequest
from sgviz.messages import EmbeddingReqInput, GenerateReqInput, SamplingParams
from sgviz.tokenizer_manager.bootstrap import (
    LAST_PORT,
    LAST_ROOM,
    PER_ANSWER,
    apart,
    one_meeting,
    rank_to_run,
    spread_meeting,
)


def asked(**fields: Any) -> GenerateReqInput:
    given = {"bootstrap_host": "h", "bootstrap_port": 5, "bootstrap_room": 7} | fields
    return GenerateReqInput(text="a", **given)


def meeting(host: object, port: object, room: object) -> dict[str, object]:
    return dict(zip(PER_ANSWER, (host, port, room)))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("fields", "size", "n", "wanted"),
    [
        ({}, None, 1, [("h", 5, 7)]),
        ({"bootstrap_port": None}, None, 1, [("h", None, 7)]),
        ({"bootstrap_room": 0}, None, 1, [("h", 5, 0)]),
        ({"bootstrap_room": LAST_ROOM, "bootstrap_port": LAST_PORT}, None, 1, [("h", LAST_PORT, LAST_ROOM)]),
        ({"bootstrap_room": [7]}, 1, 1, [("h", 5, 7)]),
        ({"bootstrap_room": [7, 8]}, 2, 1, [("h", 5, 7), ("h", 5, 8)]),
        ({"bootstrap_room": [7, 8], "bootstrap_host": ["h", "i"], "bootstrap_port": [5, None]}, 2, 1,
         [("h", 5, 7), ("i", None, 8)]),
        ({"bootstrap_room": [7, 8, 9]}, None, 3, [(["h"] * 3, [5] * 3, [7, 8, 9])]),
        ({"bootstrap_room": [1, 2, 3, 4]}, 2, 2, [(["h"] * 2, [5] * 2, [1, 2]), (["h"] * 2, [5] * 2, [3, 4])]),
    ],
)  # fmt: skip
def test_each_answer_has_a_meeting(
    mode: str, fields: dict[str, Any], size: int | None, n: int, wanted: list[tuple[object, ...]]
) -> None:
    found = spread_meeting(asked(**fields), size, n, mode)
    assert found == [meeting(*each) for each in wanted]


@pytest.mark.parametrize(
    ("fields", "size", "n", "param"),
    [
        ({"bootstrap_room": None}, None, 1, "bootstrap_room"),
        ({"bootstrap_host": None}, None, 1, "bootstrap_host"),
        ({"bootstrap_room": -1}, None, 1, "bootstrap_room"),
        ({"bootstrap_room": LAST_ROOM + 1}, None, 1, "bootstrap_room"),
        ({"bootstrap_room": True}, None, 1, "bootstrap_room"),
        ({"bootstrap_room": "7"}, None, 1, "bootstrap_room"),
        ({"bootstrap_room": 7.0}, None, 1, "bootstrap_room"),
        ({"bootstrap_room": [7]}, None, 1, "bootstrap_room"),
        ({"bootstrap_room": 7}, 1, 1, "bootstrap_room"),
        ({"bootstrap_room": 7}, None, 2, "bootstrap_room"),
        ({"bootstrap_room": [7]}, 2, 1, "bootstrap_room"),
        ({"bootstrap_room": [7, 8, 9]}, 2, 1, "bootstrap_room"),
        ({"bootstrap_room": [7, 7]}, 2, 1, "bootstrap_room"),
        ({"bootstrap_room": [7, None]}, 2, 1, "bootstrap_room"),
        ({"bootstrap_room": [7, 8], "bootstrap_host": ["h"]}, 2, 1, "bootstrap_host"),
        ({"bootstrap_room": [7, 8], "bootstrap_host": ["h", ""]}, 2, 1, "bootstrap_host"),
        ({"bootstrap_host": 5}, None, 1, "bootstrap_host"),
        ({"bootstrap_port": 0}, None, 1, "bootstrap_port"),
        ({"bootstrap_port": LAST_PORT + 1}, None, 1, "bootstrap_port"),
        ({"bootstrap_port": [5]}, None, 1, "bootstrap_port"),
        ({"disagg_prefill_dp_rank": -1}, None, 1, "disagg_prefill_dp_rank"),
        ({"disagg_prefill_dp_rank": 64}, None, 1, "disagg_prefill_dp_rank"),
        ({"disagg_prefill_dp_rank": "0"}, None, 1, "disagg_prefill_dp_rank"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], size: int | None, n: int, param: str) -> None:
    for mode in ("prefill", "decode"):
        with pytest.raises(BadRequest) as error:
            spread_meeting(asked(**fields), size, n, mode)
        assert error.value.param == param and param in error.value.message


def test_a_server_that_does_both_takes_a_room_only_to_choose_a_rank() -> None:
    for name in (*PER_ANSWER, "disagg_prefill_dp_rank"):
        given = GenerateReqInput(text="a", **{name: 1})
        if name != "bootstrap_room":
            with pytest.raises(BadRequest, match=name):
                spread_meeting(given, None, 1, "null", by_room=True)
        with pytest.raises(BadRequest, match=name):
            spread_meeting(given, None, 1, "null")
    by_room = {"bootstrap_host": None, "bootstrap_port": None}
    for room, size, found in ((7, None, [7]), (7, 2, [7, 7]), ([7, 8], 2, [7, 8]), (None, 2, [None, None])):
        got = spread_meeting(asked(bootstrap_room=room, **by_room), size, 1, "null", by_room=True)
        assert got == [{"bootstrap_room": each} for each in found]
    for room in ([7], [7, 8, 9], -1, [7, "8"]):
        with pytest.raises(BadRequest, match="bootstrap_room"):
            spread_meeting(asked(bootstrap_room=room, **by_room), 2, 1, "null", by_room=True)


def test_vectors_have_no_meeting() -> None:
    assert spread_meeting(EmbeddingReqInput(text="a"), None, 1, "prefill") == [{}]
    assert spread_meeting(EmbeddingReqInput(text=["a", "b"]), 2, 1, "decode") == [{}, {}]


def test_several_answers_are_requests_of_their_own() -> None:
    params = SamplingParams(n=2, sampling_seed=5, temperature=1.0)
    prompt = asked(rid="r", sampling_params=params, **meeting(["h", "h"], [5, 6], [7, 8]))
    answers = apart([prompt], 2)
    assert [answer.rid for answer in answers] == ["r_0", "r_1"]
    assert [answer.bootstrap_room for answer in answers] == [7, 8]
    assert [answer.bootstrap_port for answer in answers] == [5, 6]
    seeds = [answer.sampling_params for answer in answers]
    assert [(each.n, each.sampling_seed) for each in seeds if isinstance(each, SamplingParams)] == [
        (1, 5),
        (1, 6),
    ]
    assert [one_meeting(prompt, sample) for sample in (0, 1)] == [meeting("h", 5, 7), meeting("h", 6, 8)]


def test_the_rank_that_runs_a_prompt() -> None:
    both = asked(routed_dp_rank=0, disagg_prefill_dp_rank=1)
    assert rank_to_run(both, 2, "prefill") == 1
    assert rank_to_run(both, 2, "decode") == 0 and rank_to_run(both, 2, "null") == 0
    assert rank_to_run(asked(routed_dp_rank=1), 2, "prefill") == 1
    assert rank_to_run(asked(disagg_prefill_dp_rank=0), 1, "prefill") is None  # there is one
    assert rank_to_run(asked(disagg_prefill_dp_rank=1), 2, "decode") is None  # that is the other server's
    assert rank_to_run(asked(), 2, "prefill") is None
    for rank in (2, -1, True, "1", 1.0):
        for name, mode in (("disagg_prefill_dp_rank", "prefill"), ("routed_dp_rank", "decode")):
            with pytest.raises(BadRequest) as error:
                rank_to_run(asked(**{name: rank}), 2, mode)
            assert error.value.param == name and "between 0 and 1" in error.value.message
