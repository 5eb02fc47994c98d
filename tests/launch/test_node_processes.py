"""Two hosts that are one: the same engine over two processes, and every way in which one of them ends."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from free_ports import free_row
from node_process import NodeProcess
from server_process import Background, ServerProcess, gone

pytestmark = pytest.mark.slow
SILENCE_S = 3.0
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def flags(nodes: int, ranks: int, *more: str) -> list[str]:
    row = free_row(5 + ranks)
    return [
        *("--nnodes", str(nodes), "--dp-size", str(ranks), "--dist-init-addr", f"127.0.0.1:{row}"),
        *("--device", "mock", "--mock-step-ms", "10", "--node-heartbeat-timeout", str(SILENCE_S), *more),
    ]


class Nodes:
    """All nodes, ready."""

    def __init__(self, nodes: int, ranks: int) -> None:
        self.common = flags(nodes, ranks)
        self.front = ServerProcess(*self.common, wait=False)
        self.others = [NodeProcess(*self.common, "--node-rank", str(n), wait=False) for n in range(1, nodes)]
        self.children: list[psutil.Process] = []

    def __enter__(self) -> Nodes:
        try:
            for each in (self.front, *self.others):
                each.wait_ready()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self.children = [child for each in (self.front, *self.others) for child in each.children().values()]
        return self

    def __exit__(self, *error: Any) -> None:
        for each in (*self.others, self.front):
            each.__exit__(*error)

    def post(self, rank: int, params: dict[str, Any], **more: str) -> httpx.Response:
        body = {"text": "go on", "routed_dp_rank": rank, "sampling_params": params, **more}
        return httpx.post(f"{self.front.url}/generate", json=body, timeout=60)

    def under_way(self, ranks: list[int], **more: str) -> list[Background]:
        """Long requests, one for each rank named, all running."""
        calls = [Background(lambda rank=rank: self.post(rank, LONG, **more)) for rank in ranks]
        eventually(lambda: sum(state.get("num_running_reqs", 0) for state in self.states()) == len(ranks))
        return calls

    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = httpx.get(f"{self.front.url}/server_info", timeout=60).json()[
            "internal_states"
        ]
        return states


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.05)


def message(call: Background) -> str:
    call.join(60)
    assert call.error is None and call.result.status_code == 503, call.error or call.result.text
    return str(call.result.json()["error"]["message"])


def test_ranks_of_another_node_die_as_those_of_this_one_do() -> None:
    with Nodes(2, 4) as two:
        (other,) = two.others
        found = [two.post(rank, {"max_new_tokens": 2}).json()["meta_info"]["dp_rank"] for rank in range(4)]
        assert found == [0, 1, 2, 3]
        assert httpx.get(f"{other.url}/health").status_code == 200
        # an abort reaches the rank that has the request
        (call,) = two.under_way([2], rid="far")
        assert (
            httpx.post(f"{two.front.url}/abort_request", json={"rid": "far"}, timeout=60).status_code == 200
        )
        call.join(60)
        assert call.result.json()["meta_info"]["finish_reason"]["type"] == "abort"
        # one scheduler of the other node
        calls = two.under_way([0, 2, 3])
        children = other.children()
        next(child for name, child in children.items() if "scheduler-3" in name).kill()
        assert re.search(r"data parallel rank 3, .*SIGKILL", message(calls[2]))
        assert [state["active"] for state in two.states()] == [True, True, True, False]
        assert two.post(3, {"max_new_tokens": 1}).status_code == 503
        # the other node, whose scheduler goes with it
        other.process.kill()
        assert "node 1 gave no sign of life for 3 s" in message(calls[1])
        assert gone(list(children.values()))
        assert [state["active"] for state in two.states()] == [True, True, False, False]
        # who is left goes on
        assert calls[0].is_alive()
        answers = [httpx.post(f"{two.front.url}/generate", json={"text": "a"}, timeout=60) for _ in range(4)]
        assert [answer.json()["meta_info"]["dp_rank"] for answer in answers] == [0, 1, 0, 1]
        assert httpx.get(f"{two.front.url}/health", timeout=60).status_code == 200
        # it cannot come back
        with NodeProcess(*two.common, "--node-rank", "1", wait=False) as again:
            assert again.wait(60) == 1
            assert "a node joins once" in again.text() and "Traceback" not in again.text()
        two.front.signal(signal.SIGINT)
        assert two.front.wait(60) == 0, two.front.text()
    assert gone(two.children) and two.front.leftovers() == []


def test_a_node_that_is_stopped_is_told_of_and_a_lost_node_zero_ends_the_others() -> None:
    with Nodes(3, 3) as three:
        first, second = three.others
        (call,) = three.under_way([1])
        first.signal(signal.SIGTERM)
        assert first.wait(60) == 0
        assert "node 1 ended: it was stopped" in message(call)
        assert [state["active"] for state in three.states()] == [True, False, True]
        three.front.process.kill()
        assert second.wait(SILENCE_S + 20) == 1
        assert "gave no sign of life for 3 s; this node ends" in second.text()
        assert gone(three.children)


def test_settings_that_differ_end_the_start_on_all_sides_with_the_reason() -> None:
    common = flags(3, 3)
    with (
        ServerProcess(*common, wait=False) as front,
        NodeProcess(*common, "--node-rank", "1") as fits,
        NodeProcess(*common, "--page-size", "16", "--node-rank", "2", wait=False) as other,
    ):
        assert [each.wait(60) for each in (other, front, fits)] == [1, 1, 1]
        assert "refused this node: it has page_size 16 (node 0 has 1)" in other.text()
        assert "node 2 does not fit: it has page_size 16" in front.text()
        assert "ended: node 2 does not fit: it has page_size 16" in fits.text()
        assert "Traceback" not in front.text() + other.text() + fits.text()
        assert front.leftovers() == []
