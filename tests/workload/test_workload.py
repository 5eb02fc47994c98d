"""Workloads: the same seed gives the same value, lengths are exact, prefixes are shared as asked, files come back."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz import workload
from sgviz.errors import BadRequest, SgvizError
from sgviz.workload import Choice, LogNormal, Request, Segment, Uniform, Workload

SIZES = {"prompt_tokens": (5, 40), "output_tokens": LogNormal(20, 0.8, low=2, high=100)}
VOCAB = 5000


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def makers() -> dict[str, object]:
    return {
        "poisson": lambda seed: workload.poisson(rate=4, num_requests=30, seed=seed, **SIZES),
        "gamma": lambda seed: workload.gamma(rate=4, cv=3, num_requests=30, seed=seed, **SIZES),
        "closed_loop": lambda seed: workload.closed_loop(concurrency=4, num_requests=30, seed=seed, **SIZES),
        "heavy_tail": lambda seed: workload.heavy_tail(num_requests=30, output_tokens=(2, 9), rate=4, seed=seed),
        "shared_prefix": lambda seed: workload.shared_prefix(
            groups=3, prompts_per_group=5, prefix_tokens=50, question_tokens=(3, 9), output_tokens=4, seed=seed
        ),
        "multi_turn": lambda seed: workload.multi_turn(
            sessions=4, turns=3, question_tokens=(3, 9), output_tokens=(2, 5), system_tokens=20, think_s=0.5,
            seed=seed,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", makers())
def test_a_seed_is_a_workload(name: str, tmp_path: Path) -> None:
    make = makers()[name]
    first, same, other = make(1), make(1), make(2)
    assert first == same and first != other
    first.save(tmp_path / "w.json")
    assert workload.load(tmp_path / "w.json") == first
    assert f"{len(first.requests)} requests" in str(first) and name in str(first)
    assert next(request.at_s for request in first.requests if not request.after) == 0


@pytest.mark.parametrize("name", makers())
def test_prompts_have_exactly_the_given_lengths(name: str) -> None:
    made = makers()[name](3)
    for request in made.requests:
        ids = made.ids_of(request, VOCAB, history=[7] * request.history_tokens)
        assert len(ids) == request.prompt_tokens >= 1
        assert all(16 <= token < VOCAB for token in ids[request.history_tokens :])
        assert ids == made.ids_of(request, VOCAB, history=[7] * request.history_tokens)
    assert made.input_tokens == sum(request.prompt_tokens for request in made.requests)
    assert made.longest >= max(request.prompt_tokens for request in made.requests)


def test_poisson_gaps_have_the_rate_and_gamma_gaps_the_variation() -> None:
    def gaps(made: Workload) -> list[float]:
        at = [request.at_s for request in made.requests]
        assert at == sorted(at)
        return [b - a for a, b in pairwise(at)]

    sizes = {"num_requests": 4000, "prompt_tokens": 1, "output_tokens": 1, "seed": 5}
    steady = gaps(workload.poisson(rate=10, **sizes))
    assert fmean(steady) == pytest.approx(0.1, rel=0.05) and pstdev(steady) == pytest.approx(0.1, rel=0.1)
    bursts = gaps(workload.gamma(rate=10, cv=3, **sizes))
    assert fmean(bursts) == pytest.approx(0.1, rel=0.2) and pstdev(bursts) == pytest.approx(0.3, rel=0.25)
    beat = gaps(workload.gamma(rate=10, cv=0.1, **sizes))
    assert pstdev(beat) == pytest.approx(0.01, rel=0.1)


@given(st.integers(0, 50))
def test_lengths_stay_in_their_range(seed: int) -> None:
    made = workload.poisson(
        rate=1, num_requests=20, prompt_tokens=Uniform(3, 7), output_tokens=Choice((2, 9), (1, 3)), seed=seed
    )
    assert all(3 <= request.prompt_tokens <= 7 for request in made.requests)
    assert {request.output_tokens for request in made.requests} <= {2, 9}


def test_prompts_of_a_group_share_their_prefix_and_nothing_more() -> None:
    made = makers()["shared_prefix"](0)
    ids = {request.rid: made.ids_of(request, VOCAB) for request in made.requests}
    for a in made.requests:
        for b in made.requests:
            shared = common_prefix(ids[a.rid], ids[b.rid])
            if a.rid != b.rid:
                assert 50 <= shared <= 52 if a.group == b.group else shared <= 2
    assert sorted({request.group for request in made.requests}) == ["g0", "g1", "g2"]


def test_a_turn_follows_the_whole_conversation_before_it() -> None:
    made = makers()["multi_turn"](0)
    by_rid = {request.rid: request for request in made.requests}
    for request in made.requests:
        if request.after:
            before = by_rid[request.after]
            assert request.history_tokens == before.prompt_tokens + before.output_tokens
            assert request.group == before.group
    first = [request for request in made.requests if not request.after]
    a, b = (made.ids_of(request, VOCAB) for request in first[:2])
    assert common_prefix(a, b) >= 20
    with pytest.raises(BadRequest, match="history"):
        made.ids_of(made.requests[-1], VOCAB)


def test_a_trace_gives_its_arrivals_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens,more\n"
        "10.0,374,44,x\n12.5,0,5,x\n11.0,5000,300,x\n14,7,1,x\n"
    )
    made = workload.trace(path, limit=3, time_scale=2, max_prompt_tokens=1000)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in made.requests] == [
        (0.0, 374, 44), (2.0, 1000, 300), (5.0, 1, 5),
    ]  # fmt: skip
    assert len(workload.trace(path, start=3).requests) == 1
    with pytest.raises(BadRequest, match="no row"):
        workload.trace(path, start=4)
    with pytest.raises(BadRequest, match="time_scale"):
        workload.trace(path, time_scale=0)
    with pytest.raises(SgvizError, match="nowhere"):
        workload.trace(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("arrived_at,num_prefill_tokens\n0,1\n", "num_decode_tokens"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,x,1\n", "line 2"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n-1,1,1\n", "line 3"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1\n", "line 2"),
    ],
)
def test_a_faulty_trace_is_refused_with_its_line(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadRequest, match=fault):
        workload.trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "call",
    [
        lambda: workload.poisson(rate=0, num_requests=1, prompt_tokens=1, output_tokens=1),
        lambda: workload.poisson(rate=1, num_requests=0, prompt_tokens=1, output_tokens=1),
        lambda: workload.poisson(rate=1, num_requests=1, prompt_tokens=0, output_tokens=1),
        lambda: workload.poisson(rate=1, num_requests=1, prompt_tokens=(5, 3), output_tokens=1),
        lambda: workload.gamma(rate=1, cv=0, num_requests=1, prompt_tokens=1, output_tokens=1),
        lambda: workload.closed_loop(concurrency=0, num_requests=1, prompt_tokens=1, output_tokens=1),
        lambda: workload.closed_loop(concurrency=1, num_requests=1, prompt_tokens="9", output_tokens=1),
        lambda: workload.multi_turn(sessions=1, turns=1, question_tokens=1, output_tokens=1, think_s=-1),
    ],
)
def test_numbers_out_of_range_are_refused(call: object) -> None:
    with pytest.raises(BadRequest):
        call()


def test_a_workload_made_by_hand_is_checked(tmp_path: Path) -> None:
    one = Request(rid="a", at_s=0, prompt=(Segment("x", 4),), output_tokens=2)
    for wrong in (
        (one, one),
        (Request(rid="b", at_s=-1, prompt=(Segment("x", 4),), output_tokens=2),),
        (Request(rid="b", at_s=0, prompt=(), output_tokens=2),),
        (Request(rid="b", at_s=0, prompt=(Segment("x", 4),), output_tokens=2, after="a"),),
        (
            one,
            Request(rid="b", at_s=0, prompt=(Segment("x", 4),), output_tokens=2, after="a", history_tokens=5),
        ),
        (Request(rid="b", at_s=0, prompt=(Segment("x", 4),), output_tokens=2, history_tokens=5),),
    ):
        with pytest.raises(BadRequest):
            Workload(name="hand", seed=0, requests=wrong)
    with pytest.raises(BadRequest, match="vocabulary of 100"):
        Workload(name="hand", seed=0, requests=(one,), vocab=(10, 1000)).ids_of(one, 100)
    (tmp_path / "w.json").write_text('{"name": "x"}')
    with pytest.raises(BadRequest, match="no workload"):
        workload.load(tmp_path / "w.json")


def test_the_table_has_a_row_a_request() -> None:
    made = makers()["shared_prefix"](0)
    assert list(made.table.rid) == [request.rid for request in made.requests]
    assert made.table.prompt_tokens.sum() == made.input_tokens


POISSON = {"rate": 4, "num_requests": 3, **SIZES}
WRONG_NUMBERS = [
    pytest.param(lambda: workload.poisson(**{**POISSON, "num_requests": 3.0}), "num_requests is 3.0", id="count"),
    pytest.param(lambda: workload.poisson(**{**POISSON, "num_requests": True}), "num_requests is True", id="truth"),
    pytest.param(lambda: workload.poisson(**{**POISSON, "num_requests": "3"}), "num_requests is '3'", id="text"),
    pytest.param(lambda: workload.poisson(**{**POISSON, "rate": "4"}), "rate is '4'", id="rate"),
    pytest.param(lambda: workload.poisson(**{**POISSON, "rate": float("nan")}), "rate is nan", id="nan"),
    pytest.param(lambda: workload.poisson(**POISSON, concurrency=2.5), "concurrency is 2.5", id="concurrency"),
    pytest.param(lambda: workload.poisson(**{**POISSON, "prompt_tokens": 5.0}), "prompt_tokens is 5.0", id="length"),
    pytest.param(lambda: Uniform(1.5, 3), "got 1.5 to 3", id="range"),
    pytest.param(lambda: Uniform("1", 3), "got '1' to 3", id="text range"),
    pytest.param(lambda: LogNormal("20", 0.8), "median is '20'", id="median"),
    pytest.param(lambda: LogNormal(20, 0.8, low=1.5), "low is 1.5", id="low"),
    pytest.param(lambda: Choice((1, 2.5)), "whole lengths", id="choice"),
    pytest.param(lambda: Choice((1, 2), (0, 0)), "weights is 0", id="weights"),
    pytest.param(
        lambda: workload.multi_turn(sessions=2, turns=2.0, question_tokens=3, output_tokens=2), "turns is 2.0",
        id="turns",
    ),
    pytest.param(
        lambda: workload.multi_turn(sessions=2, turns=2, question_tokens=3, output_tokens=2, think_s="1"),
        "think_s is '1'", id="pause",
    ),
    pytest.param(
        lambda: workload.shared_prefix(
            groups=2.0, prompts_per_group=2, prefix_tokens=5, question_tokens=3, output_tokens=2
        ),
        "groups is 2.0", id="groups",
    ),
    pytest.param(lambda: workload.trace("nowhere.csv", limit=2.0), "limit is 2.0", id="limit"),
    pytest.param(lambda: workload.trace("nowhere.csv", start=-1), "start is -1", id="start"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), WRONG_NUMBERS)
def test_a_number_of_the_wrong_kind_is_a_clear_error(make: Callable[[], object], said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        make()


def test_numbers_of_numpy_count() -> None:
    assert workload.poisson(**{**POISSON, "num_requests": np.int64(3)}) == workload.poisson(**POISSON)
