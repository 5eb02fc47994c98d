"""Whole engines of several schedulers, as threads: the same answers, the same questions, sessions, pauses, ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, SgvizError, Unavailable
from sgviz.events.schema import DpChose
from sgviz.messages import GenerateReqInput, SamplingParams

PROMPTS = [
    "Hello there", "The capital of France is", "one two three four five", "a", "Once upon a time " * 4,
    "The capital of France was", "b", "to be or not to be",
]  # fmt: skip
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
MOCK = {"model": "tiny-llama", "device": "mock"}


def ids_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The greedy ids of a single scheduler."""
    with Engine(model="tiny-llama", device="cpu") as engine:
        return ids_of(engine.generate(PROMPTS, GREEDY))


ANTI_CLOCKWISE = """
class AntiClockwise:
    name = "anti-clockwise"

    def __init__(self):
        self.last = 0

    def choose(self, request, ranks):
        self.last = (self.last - 1) % len(ranks)
        return self.last
"""
METHODS = ("round_robin", "total_requests", "total_tokens", "auto", "own")


def method_of(name: str, folder: Path) -> str:
    """As the setting takes it; `own` is a class in a file of the user's."""
    if name != "own":
        return name
    file = folder / "own_ranks.py"
    file.write_text(ANTI_CLOCKWISE)
    return f"{file}:AntiClockwise"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_greedy_ids_as_of_one_scheduler(
    alone: list[list[int]], size: int, method: str, tmp_path: Path
) -> None:
    how = method_of(method, tmp_path)
    with Engine(model="tiny-llama", device="cpu", dp_size=size, load_balance_method=how) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        bodies = [event.body for event in engine.pipeline.ring.snapshot()]
    chosen = {body.rid: body for body in bodies if isinstance(body, DpChose)}
    assert ids_of(outputs) == alone
    for output in outputs:
        assert output["meta_info"]["dp_rank"] == chosen[output["meta_info"]["id"]].rank
    assert len({output["meta_info"]["dp_rank"] for output in outputs}) == size


@pytest.mark.parametrize("method", [*METHODS, "follow_bootstrap_room"])
def test_one_rank_is_one_scheduler_whatever_the_policy(
    alone: list[list[int]], method: str, tmp_path: Path
) -> None:
    how = method_of(method, tmp_path)
    with Engine(model="tiny-llama", device="cpu", dp_size=1, load_balance_method=how) as engine:
        assert ids_of(engine.generate(PROMPTS, GREEDY)) == alone
        assert set(engine.pipeline.infos) == {"scheduler", "detokenizer"}  # nobody between them


@pytest.mark.parametrize("size", [2, 4])
def test_the_room_chooses_the_rank(alone: list[list[int]], size: int) -> None:
    with Engine(
        model="tiny-llama", device="cpu", dp_size=size, load_balance_method="follow_bootstrap_room"
    ) as engine:

        async def one(room: int) -> dict[str, Any]:
            params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
            obj = GenerateReqInput(text=PROMPTS[0], sampling_params=params, bootstrap_room=room)
            async for output in engine.pipeline.manager.generate_request(obj):
                assert isinstance(output, dict)
                return output
            raise AssertionError("no output")

        for room in (5, 4, 7):
            output = engine.pipeline.loop.call(one(room))
            assert (output["output_ids"], output["meta_info"]["dp_rank"]) == (alone[0], room % size)
        with pytest.raises(BadRequest, match="bootstrap_room"):
            engine.generate("no room")


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with Engine(**MOCK, dp_size=2, mock_step_ms=2.0, custom_logit_processors=None) as engine:
        yield engine


def test_two_hundred_at_once_over_four_are_fifty_each() -> None:
    with Engine(**MOCK, dp_size=4) as engine:
        outputs = engine.generate(["burst"] * 200, {"max_new_tokens": 2})
        order = [e.body.rank for e in engine.pipeline.ring.snapshot() if isinstance(e.body, DpChose)]
    assert order == [number % 4 for number in range(200)]
    assert Counter(output["meta_info"]["dp_rank"] for output in outputs) == dict.fromkeys(range(4), 50)


def test_the_account_of_all_is_the_sum_and_that_of_each(two: Engine) -> None:
    state = two.internal_state()
    ranks = state["ranks"]
    assert [(rank["dp_rank"], rank["active"]) for rank in ranks] == [(0, True), (1, True)]
    for name in ("max_total_num_tokens", "free_rows", "forward_ct", "num_live_reqs", "max_running_requests"):
        assert state[name] == sum(rank[name] for rank in ranks)
    assert state["max_req_input_len"] == ranks[0]["max_req_input_len"]
    load = two.get_load()
    assert load.max_total_num_tokens == state["max_total_num_tokens"]


def test_what_a_request_may_name_as_its_rank(two: Engine) -> None:
    for rank in (1, 0, 1):
        assert two.generate("a", {"max_new_tokens": 1}, routed_dp_rank=rank)["meta_info"]["dp_rank"] == rank
        assert two.encode("a", routed_dp_rank=rank)["meta_info"]["dp_rank"] == rank
    for wrong in (2, -1, True, "0", 1.0):
        with pytest.raises(BadRequest) as error:
            two.generate("a", routed_dp_rank=wrong)
        assert error.value.param == "routed_dp_rank"
        assert f"must be between 0 and 1, got {wrong!r}" in error.value.message


def test_one_scheduler_takes_rank_0_only() -> None:
    with Engine(**MOCK) as engine:
        assert engine.generate("a", {"max_new_tokens": 1}, routed_dp_rank=0)["meta_info"]["dp_rank"] == 0
        with pytest.raises(BadRequest, match="one rank"):
            engine.generate("a", routed_dp_rank=1)


@pytest.fixture(scope="module")
def server(two: Engine) -> str:
    return two.serve(port=0).url


BODIES = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
}


@pytest.mark.parametrize("path", BODIES)
def test_header_over_body_and_both_are_checked(server: str, two: Engine, path: str) -> None:
    def rank(headers: dict[str, str], **fields: object) -> int:
        answer = httpx.post(server + path, json={**BODIES[path], **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        return next(
            e.body.rank for e in reversed(two.pipeline.ring.snapshot()) if isinstance(e.body, DpChose)
        )

    assert rank({"X-Data-Parallel-Rank": "1"}, routed_dp_rank=0) == 1
    assert rank({"X-Data-Parallel-Rank": "0" * 30 + "1"}) == 1 and rank({"X-Data-Parallel-Rank": "00"}) == 0
    assert rank({"x-data-parallel-rank": "0"}) == 0
    for name in ("routed_dp_rank", "data_parallel_rank"):
        assert [rank({}, **{name: k}) for k in (1, 0)] == [1, 0]
    for headers, fields, param in (
        ({"X-Data-Parallel-Rank": "one"}, {}, "X-Data-Parallel-Rank"),
        ({"X-Data-Parallel-Rank": "-1"}, {}, "X-Data-Parallel-Rank"),
        ({"X-Data-Parallel-Rank": "9" * 30}, {}, "routed_dp_rank"),
        ({}, {"routed_dp_rank": 2}, "routed_dp_rank"),
        ({}, {"routed_dp_rank": "1"}, "routed_dp_rank"),
        ({}, {"data_parallel_rank": True}, "data_parallel_rank"),
        ({}, {"routed_dp_rank": 1, "data_parallel_rank": 0}, "routed_dp_rank"),
    ):
        answer = httpx.post(server + path, json={**BODIES[path], **fields}, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_what_the_server_tells_of_its_ranks(server: str) -> None:
    assert httpx.get(f"{server}/health").status_code == 200
    told = httpx.get(f"{server}/server_info").json()
    assert told["dp_size"] == 2
    assert [rank["dp_rank"] for rank in told["internal_states"]] == [0, 1]
    assert [entry["dp_rank"] for entry in httpx.get(f"{server}/get_load").json()] == [0, 1]
    assert [load["dp_rank"] for load in httpx.get(f"{server}/v1/loads").json()["loads"]] == [0, 1]
    assert [load["dp_rank"] for load in httpx.get(f"{server}/v1/loads?dp_rank=1").json()["loads"]] == [1]
    assert httpx.get(f"{server}/v1/loads?dp_rank=2").status_code == 400
    lines = httpx.get(f"{server}/v1/loads?format=prometheus").text.splitlines()
    assert lines.count("# TYPE sglang_num_running_reqs gauge") == 1
    assert {'sglang_num_running_reqs{dp_rank="0"} 0', 'sglang_num_running_reqs{dp_rank="1"} 0'} <= set(lines)


def test_a_session_lives_on_one_rank(two: Engine) -> None:
    for number in range(4):
        name = two.open_session(1000, f"talk-{number}")
        with pytest.raises(BadRequest, match="open"):
            two.open_session(1000, name)
        ranks, rid = set(), None
        for turn in range(3):
            output = two.generate(
                f"turn {turn}",
                {"max_new_tokens": 2},
                rid=f"{name}-{turn}",
                session_params={"id": name, "rid": rid},
            )
            ranks.add(output["meta_info"]["dp_rank"])
            rid = f"{name}-{turn}"
        assert len(ranks) == 1 and output["meta_info"]["prompt_tokens"] > 15
        two.close_session(name)
        with pytest.raises(BadRequest, match="open"):
            two.close_session(name)


def under_way(engine: Engine, pool: ThreadPoolExecutor, count: int) -> list[Any]:
    """So many long requests that have begun to run, given to the ranks in the order of their numbers."""
    calls = []
    for number in range(count):
        calls.append(pool.submit(engine.generate, f"p{number}", LONG, rid=f"long-{number}"))
        while engine.internal_state()["num_running_reqs"] <= number:
            assert not calls[-1].done(), calls[-1].result()
    return calls


def test_aborts_pauses_and_flushes_reach_all_ranks(two: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = under_way(two, pool, 6)
        assert {rank["num_running_reqs"] for rank in two.internal_state()["ranks"]} == {3}
        assert two.pause_generation("retract") == 6
        assert two.internal_state()["num_paused_reqs"] == 6
        assert not two.flush_cache() or two.internal_state()["num_live_reqs"] == 6
        two.continue_generation()
        for number in (1, 4):
            two.abort(f"long-{number}")
            assert calls[number].result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert two.pause_generation("abort") == 0
        two.continue_generation()
        assert {call.result()["meta_info"]["finish_reason"]["type"] for call in calls} == {"abort"}
    assert two.flush_cache() is True
    assert two.internal_state()["evictable_tokens"] == 0


def test_samples_of_one_prompt_may_be_on_several_ranks(two: Engine) -> None:
    outputs = two.generate("x", {"n": 4, "max_new_tokens": 3})
    assert len(outputs) == 4 and {output["meta_info"]["dp_rank"] for output in outputs} == {0, 1}


def test_a_debugger_stops_the_first_rank_and_the_others_go_on(two: Engine) -> None:
    with two.debugger() as debugger:
        debugger.pause()
        assert two.generate("a", {"max_new_tokens": 2}, routed_dp_rank=1)["meta_info"]["dp_rank"] == 1


def test_components_are_named_by_rank(two: Engine) -> None:
    two.generate(["a"] * 4, {"max_new_tokens": 1})
    assert {f"scheduler-{k}" for k in range(2)} | {"data_parallel_controller", "detokenizer"} == set(
        two.pipeline.infos
    )
    names = {event.component for event in two.pipeline.ring.snapshot()}
    assert {"scheduler-0", "scheduler-1", "data_parallel_controller"} <= names and "scheduler" not in names


def test_a_policy_object_is_for_one_scheduler() -> None:
    class Own:
        name = "own"

        def order(self, waiting: object, view: object) -> object:
            return waiting

    with pytest.raises(ConfigError, match="dp_size") as error:
        Engine(**MOCK, dp_size=2, schedule_policy=Own())
    assert error.value.param == "schedule_policy"


OWN = """
class Last:
    name = "last"

    def choose(self, request, ranks):
        return max(rank.rank for rank in ranks if rank.active)


class Raising(Last):
    def choose(self, request, ranks):
        if len(request.input_ids) == 3:
            raise RuntimeError("not this one")
        return super().choose(request, ranks)
"""


def test_a_dispatch_policy_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own_dispatch.py"
    file.write_text(OWN)
    with Engine(**MOCK, dp_size=3, load_balance_method=f"{file}:Raising") as engine:
        assert {o["meta_info"]["dp_rank"] for o in engine.generate(["a"] * 4, {"max_new_tokens": 1})} == {2}
        with pytest.raises(SgvizError, match="not this one") as error:
            engine.generate(input_ids=[1, 2, 3])
        assert error.value.status == 500
        assert engine.generate("a", {"max_new_tokens": 1})["meta_info"]["dp_rank"] == 2
    with pytest.raises(ConfigError, match="Lost"):
        Engine(**MOCK, dp_size=2, load_balance_method=f"{file}:Lost")


def names_of_threads() -> list[str]:
    """Of all engines that there are now, components only."""
    kinds = ("sgviz-scheduler", "sgviz-data", "sgviz-detok")
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(kinds))


BOMB = """
class Boom(BaseException): ...
class Bomb:
    name = "bomb"
    def order(self, waiting, view):
        if any(len(req.origin_input_ids) == 66 for req in waiting):
            raise Boom("boom")
        return waiting
"""


def test_a_rank_whose_loop_raises_takes_its_requests_along_and_no_others(tmp_path: Path) -> None:
    """Threads: the same as a killed process, but for the cause."""
    before = names_of_threads()
    file = tmp_path / "bomb.py"
    file.write_text(BOMB)
    settings = {**MOCK, "dp_size": 3, "mock_step_ms": 5.0, "schedule_policy": f"{file}:Bomb"}
    with ThreadPoolExecutor(8) as pool, Engine(**settings) as engine:
        calls = under_way(engine, pool, 6)
        with pytest.raises(Unavailable, match="boom"):
            engine.generate(input_ids=[5] * 66, routed_dp_rank=1)
        for number, call in enumerate(calls):
            if number % 3 == 1:
                with pytest.raises(Unavailable, match="data parallel rank 1"):
                    call.result()
            else:
                engine.abort(f"long-{number}")
                assert call.result()["meta_info"]["finish_reason"]["type"] == "abort"
        later = engine.generate(["x"] * 6, {"max_new_tokens": 1})
        assert Counter(o["meta_info"]["dp_rank"] for o in later) == {0: 3, 2: 3}
        for rank in (0, 2):
            with contextlib.suppress(Unavailable):
                engine.generate(input_ids=[5] * 66, routed_dp_rank=rank)
        assert engine.pipeline.dead.wait(10)
        with pytest.raises(Unavailable):
            engine.generate("y")
    assert names_of_threads() == before


def test_a_rank_that_cannot_start_ends_all() -> None:
    before = names_of_threads()
    with pytest.raises(SgvizError):
        Engine(**MOCK, dp_size=3, max_total_tokens=1, page_size=16)
    assert names_of_threads() == before


def test_in_a_running_loop() -> None:
    async def run() -> list[int]:
        with Engine(**MOCK, dp_size=2) as engine:
            outputs = await asyncio.gather(
                *[engine.async_generate("a", {"max_new_tokens": 2}) for _ in range(4)]
            )
        return sorted(output["meta_info"]["dp_rank"] for output in outputs)

    assert asyncio.run(run()) == [0, 0, 1, 1]
