"""A prefill server on one host, a decode server and a router on the other: the ids of one server, and a cut cable."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path += [
    str(Path(__file__).resolve().parents[up] / name) for up, name in ((0, "."), (1, "launch"), (1, "router"))
]

from pair_processes import RouterProcess
from server_process import ServerProcess
from two_hosts import Ask, Host, two_hosts

from sgviz.engine import Engine

pytestmark = pytest.mark.slow
PROMPTS = ["Hello there", "The capital of France is", "one two", "a", "Once upon a time " * 4, "b c"]
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
REAL = ("--device", "cpu", "--dtype", "float32", "--torch-threads", "1", "--max-total-tokens", "4096")
BEAT_S, FAILURES = 1.0, 2
LOST_S = BEAT_S * (FAILURES + 1)  # until a side that is cut off is lost to the other
BOOTSTRAP_S, HEALTH_S, ABORT_S = (
    5.0,
    1.0,
    2.0,
)  # until they must have met, until a look failed, until an abort did
SLACK_S = 10.0  # a busy machine


@dataclass(frozen=True)
class Pair:
    far: Host
    near: Host  # of the decode server, the router and the clients
    url: str  # of the router
    sides: tuple[ServerProcess, ServerProcess]

    def state(self, number: int) -> dict[str, Any]:
        """Of the scheduler of the prefill server, 0, or of the decode server, 1."""
        host = (self.far, self.near)[number]
        state: dict[str, Any] = json.loads(host.get(f"{self.sides[number].url}/server_info")[1])[
            "internal_states"
        ][0]
        return state


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        far, near = stack.enter_context(two_hosts())
        common = (
            *("--disaggregation-transfer-backend", "tcp", "--disaggregation-heartbeat-interval", str(BEAT_S)),
            *("--disaggregation-heartbeat-max-failures", str(FAILURES)),
            *("--disaggregation-bootstrap-timeout", str(BOOTSTRAP_S), *REAL),
        )
        sides = [
            stack.enter_context(
                ServerProcess(
                    "--disaggregation-mode",
                    mode,
                    "--host",
                    host.address,
                    *common,
                    wait=False,
                    prefix=host.prefix,
                )
            )
            for mode, host in (("prefill", far), ("decode", near))
        ]
        for server in sides:
            server.wait_ready()
        words = ("--prefill", sides[0].url, "--decode", sides[1].url, "--host", near.address)
        words += ("--health-timeout", str(HEALTH_S))
        router = stack.enter_context(RouterProcess(*words, prefix=near.prefix))
        yield Pair(far, near, router.url, (sides[0], sides[1]))


def generate(pair: Pair, **body: Any) -> tuple[int, Any]:
    return pair.near.post(f"{pair.url}/generate", body)


def test_the_ids_of_a_single_server(pair: Pair) -> None:
    with Engine(
        "tiny-llama", device="cpu", dtype="float32", torch_threads=1, max_total_tokens=4096
    ) as engine:
        alone = [output["output_ids"] for output in engine.generate(PROMPTS, GREEDY)]
    status, outputs = generate(pair, text=PROMPTS, sampling_params=GREEDY)
    assert status == 200 and [output["output_ids"] for output in outputs] == alone


def test_a_cut_cable_ends_what_needs_it_and_the_next_request_works(pair: Pair) -> None:
    before = generate(pair, text=PROMPTS[0], sampling_params=GREEDY)
    assert before[0] == 200
    long = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
    url = f"{pair.url}/generate"
    decoding = pair.near.ask("POST", url, {"text": "b", "stream": True, "sampling_params": long})
    decoding.wait_lines(3)
    pair.far.post(
        f"{pair.sides[0].url}/pause_generation", {"mode": "in_place"}
    )  # so that it waits for its KV
    waiting = pair.near.ask("POST", url, {"text": "over there", "sampling_params": GREEDY})
    eventually(
        lambda: pair.state(1)["decode_transfer_queue_reqs"] + pair.state(1)["decode_prealloc_queue_reqs"]
    )
    pair.far.cut()
    try:
        told = in_time(waiting, LOST_S + ABORT_S + HEALTH_S)
        assert f"the prefill server {pair.sides[0].url}" in told and "cannot know" not in told, told
        late = pair.near.ask("POST", url, {"text": "after the cut", "sampling_params": GREEDY})
        assert pair.sides[0].url in in_time(late, BOOTSTRAP_S + ABORT_S + HEALTH_S)
    finally:
        pair.far.mend()
    pair.far.post(f"{pair.sides[0].url}/continue_generation", {})
    # what had its KV went on, and so does the pair
    status, text = decoding.end()
    last = json.loads(text.splitlines()[-3].removeprefix("data: "))
    assert status == 200 and last["meta_info"]["completion_tokens"] == 1500
    eventually(lambda: generate(pair, text=PROMPTS[0], sampling_params=GREEDY)[0] == 200)
    after = generate(pair, text=PROMPTS[0], sampling_params=GREEDY)
    assert after[1]["output_ids"] == before[1]["output_ids"]
    for number in (0, 1):  # nothing is held by what ended
        eventually(lambda side=number: pair.state(side)["num_live_reqs"] == 0)
        state = pair.state(number)
        assert state["available_tokens"] + state["evictable_tokens"] == state["max_total_num_tokens"]


def in_time(call: Ask, seconds: float) -> str:
    """It ends with an error of the servers within that time; what is told of it."""
    begun = time.monotonic()
    status, text = call.end(seconds + SLACK_S + 30)
    took = time.monotonic() - begun
    assert status in (500, 502, 503), (status, text)
    assert took < seconds + SLACK_S, (took, text)
    told: str = json.loads(text)["error"]["message"]
    return told


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.1)
