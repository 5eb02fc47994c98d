"""Schedulers as processes: the same answers, and what becomes of an engine whose processes are killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # server_process

from server_process import Background, ServerProcess

from sgviz.engine import Engine
from sgviz.errors import BadRequest, Unavailable
from sgviz.events.schema import DpChose, DpRankChanged
from sgviz.serving.routing import ranks_out

pytestmark = pytest.mark.slow
MOCK: dict[str, Any] = {"model": "tiny-llama", "device": "mock", "mock_step_ms": 10.0, "mode": "processes"}
LONG = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
PROMPTS = ["Hello there", "The capital of France is", "one two", "a", "Once upon a time " * 4]
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


def pid_of(engine: Engine, component: str) -> int:
    return engine.pipeline.infos[component].pid


def eventually(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.02)


def under_way(engine: Engine, pool: ThreadPoolExecutor, count: int) -> list[Any]:
    calls = [pool.submit(engine.generate, f"p{n}", LONG, rid=f"long-{n}") for n in range(count)]
    eventually(lambda: engine.internal_state()["num_running_reqs"] == count)
    return calls


REAL: dict[str, Any] = {"model": "tiny-llama", "device": "cpu", "mode": "processes", "torch_threads": 1}
OWN = """
class Last:
    name = "last"

    def choose(self, request, ranks):
        return len(request.input_ids) % len(ranks)
"""


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The greedy ids of a single scheduler."""
    with Engine(**{**REAL, "mode": "threads"}) as engine:
        return [output["output_ids"] for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("size", "method"),
    [
        (2, "follow_bootstrap_room"), (4, "total_tokens"), (4, "follow_bootstrap_room"), (4, "round_robin"),
        (2, "total_requests"), (2, "own"),
    ],
)  # fmt: skip
def test_the_same_greedy_ids_as_of_one_scheduler(
    alone: list[list[int]], size: int, method: str, tmp_path: Path
) -> None:
    """Threads try every policy with every size; here each of both is met."""
    if method == "own":
        (tmp_path / "own.py").write_text(OWN)
        method = f"{tmp_path / 'own.py'}:Last"
    with Engine(**REAL, dp_size=size, load_balance_method=method) as engine:
        server = engine.serve(port=0)
        rooms = {"bootstrap_room": list(range(5))} if method == "follow_bootstrap_room" else {}
        body = {"text": PROMPTS, "sampling_params": GREEDY, **rooms}
        outputs = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    assert [output["output_ids"] for output in outputs] == alone
    used = len({output["meta_info"]["dp_rank"] for output in outputs})
    assert used == size or (used > 1 and "total" in method)  # these go back to a rank that is done already


def test_a_killed_rank_takes_its_requests_along_and_no_others() -> None:
    with ThreadPoolExecutor(9) as pool, Engine(**MOCK, dp_size=3) as engine:
        server = engine.serve(port=0)
        sessions = {number: engine.open_session(1000, f"talk-{number}") for number in range(6)}
        homes = {}
        for name in sessions.values():
            output = engine.generate("a", {"max_new_tokens": 1}, rid=f"{name}-0", session_params={"id": name})
            homes[name] = output["meta_info"]["dp_rank"]
        calls = under_way(engine, pool, 9)
        owners = {
            e.body.rid: e.body.rank for e in engine.pipeline.ring.snapshot() if isinstance(e.body, DpChose)
        }
        os.kill(pid_of(engine, "scheduler-1"), signal.SIGKILL)
        for number, call in enumerate(calls):
            if owners[f"long-{number}"] == 1:
                with pytest.raises(Unavailable, match=r"data parallel rank 1.*SIGKILL"):
                    call.result()
            else:
                assert len(call.result()["output_ids"]) == LONG["max_new_tokens"]
        assert Counter(owners[f"long-{number}"] for number in range(9)) == dict.fromkeys(range(3), 3)

        assert httpx.get(f"{server.url}/health").status_code == 200
        told = httpx.get(f"{server.url}/server_info").json()
        assert [rank["active"] for rank in told["internal_states"]] == [True, False, True]
        assert "SIGKILL" in told["internal_states"][1]["why"] and told["status"] == "up"
        assert ranks_out(httpx.get(f"{server.url}/ping").headers) == (3, {1})
        state = engine.internal_state()
        assert (
            state["num_live_reqs"],
            state["num_tokenizer_manager_reqs"],
            state["num_detokenizer_reqs"],
        ) == (0, 0, 0)

        later = engine.generate(["x"] * 6, {"max_new_tokens": 1})
        assert Counter(output["meta_info"]["dp_rank"] for output in later) == {0: 3, 2: 3}
        answer = httpx.post(
            f"{server.url}/generate", json={"text": "x"}, headers={"X-Data-Parallel-Rank": "1"}
        )
        assert answer.status_code == 503 and "rank 1" in answer.json()["error"]["message"]
        for name, home in homes.items():
            turn = {"session_params": {"id": name, "rid": f"{name}-0"}}
            if home == 1:  # its sessions are gone with it
                with pytest.raises(BadRequest, match="open"):
                    engine.generate("b", {"max_new_tokens": 1}, **turn)
            else:
                assert engine.generate("b", {"max_new_tokens": 1}, **turn)["meta_info"]["dp_rank"] == home
        assert [load["dp_rank"] for load in httpx.get(f"{server.url}/get_load").json()] == [0, 2]
        eventually(lambda: any(isinstance(e.body, DpRankChanged) for e in engine.pipeline.ring.snapshot()))
        (change,) = [e.body for e in engine.pipeline.ring.snapshot() if isinstance(e.body, DpRankChanged)]
        assert (change.rank, change.active, change.requests) == (1, False, 3)
        assert engine.pause_generation("retract") == 0
        engine.continue_generation()
        assert engine.flush_cache() is True


def test_the_end_of_the_last_rank_or_of_the_controller_is_the_end_of_the_engine() -> None:
    for killed in (("scheduler-0", "scheduler-1"), ("data_parallel_controller",), ("detokenizer",)):
        with ThreadPoolExecutor(4) as pool, Engine(**MOCK, dp_size=2) as engine:
            children = [psutil.Process(info.pid) for info in engine.pipeline.infos.values()]
            calls = under_way(engine, pool, 4)
            for component in killed:
                os.kill(pid_of(engine, component), signal.SIGKILL)
            for call in calls:
                with pytest.raises(Unavailable, match="died"):
                    call.result()
            assert engine.pipeline.dead.wait(10)
            with pytest.raises(Unavailable, match="died"):
                engine.generate("x")
        assert not [child for child in children if child.is_running()]


def test_an_orderly_end_with_a_lost_rank_forces_nobody() -> None:
    engine = Engine(**MOCK, dp_size=3)
    os.kill(pid_of(engine, "scheduler-2"), signal.SIGKILL)
    eventually(lambda: not engine.internal_state()["ranks"][2]["active"])
    engine.close()
    assert engine.pipeline.forced == []


def test_a_stopped_rank_is_named_by_health() -> None:
    settings = {**MOCK, "dp_size": 2, "health_timeout": 1.0}
    with Engine(**settings) as engine:
        server = engine.serve(port=0)
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        os.kill(pid_of(engine, "scheduler-1"), signal.SIGSTOP)
        try:
            answer = httpx.get(f"{server.url}/health", timeout=20)
            assert answer.status_code == 503 and "scheduler of rank 1" in answer.json()["error"]["message"]
        finally:
            os.kill(pid_of(engine, "scheduler-1"), signal.SIGCONT)
        eventually(lambda: httpx.get(f"{server.url}/health", timeout=20).status_code == 200)


def test_the_requests_of_tokenizer_workers_end_with_their_rank_too() -> None:
    flags = ("--device", "mock", "--mock-step-ms", "10", "--dp-size", "2", "--tokenizer-worker-num", "2")
    with ServerProcess(*flags) as server:

        def post(rank: int) -> Background:
            body = {"text": "go on", "routed_dp_rank": rank, "sampling_params": LONG}
            return Background(lambda: httpx.post(f"{server.url}/generate", json=body, timeout=60))

        def running() -> int:
            states = httpx.get(f"{server.url}/server_info", timeout=60).json()["internal_states"]
            return sum(state.get("num_running_reqs", 0) for state in states)

        calls = [(rank, post(rank)) for rank in (0, 1, 0, 1, 0, 1)]
        eventually(lambda: running() == 6)
        children = server.children()
        (victim,) = [child for name, child in children.items() if "scheduler-1" in name]
        victim.kill()
        for rank, call in calls:
            call.join(60)
            answer = call.result
            assert answer.status_code == (503 if rank else 200), answer.text
            if rank:
                assert "data parallel rank 1" in answer.json()["error"]["message"]
            else:
                assert answer.json()["meta_info"]["dp_rank"] == 0
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert running() == 0
