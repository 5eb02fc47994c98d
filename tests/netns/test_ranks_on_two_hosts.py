"""Data parallel ranks on two hosts with clocks of their own: the same ids, one recording, and a cable that is cut."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parents[up] / name) for up, name in ((0, "."), (1, "launch"))]

from node_process import NodeProcess
from server_process import ServerProcess, gone
from two_hosts import Host, two_hosts

import sgviz
from sgviz.engine import Engine
from sgviz.events.schema import DpChose, ProcessStarted

pytestmark = pytest.mark.slow
PROMPTS = ["Hello there", "The capital of France is", "one two", "a", "Once upon a time " * 4, "b c"]
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
REAL = ("--device", "cpu", "--dtype", "float32", "--torch-threads", "1", "--max-total-tokens", "4096")
SILENCE_S = 3.0
AHEAD_S = 86_400  # of the second host's clock
PORT = 5000  # namespaces have their own


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def start(hosts: tuple[Host, Host], *flags: str) -> tuple[ServerProcess, NodeProcess]:
    """Node 0 on the first host, node 1 on the second, where it is tomorrow if the machine can do that."""
    first, second = hosts
    ahead = ("unshare", "-T", "--monotonic", str(AHEAD_S))
    can = shutil.which("unshare") and subprocess.run([*ahead, "true"], capture_output=True).returncode == 0
    common = (
        *("--nnodes", "2", "--dp-size", "2", "--dist-init-addr", f"{first.address}:{PORT}"),
        *("--node-heartbeat-timeout", str(SILENCE_S), *flags),
    )
    other = NodeProcess(
        *common, "--node-rank", "1", "--host", second.address, wait=False,
        prefix=(*second.prefix, *(ahead if can else ())),
    )  # fmt: skip
    return ServerProcess(*common, "--host", first.address, wait=False, prefix=first.prefix), other


def test_the_same_ids_and_one_recording_of_both(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    with Engine(
        "tiny-llama", device="cpu", dtype="float32", torch_threads=1, max_total_tokens=4096
    ) as engine:
        alone = [output["output_ids"] for output in engine.generate(PROMPTS, GREEDY)]
    path = tmp_path / "both.sgv"
    front, other = start(hosts, *REAL, "--load-balance-method", "total_tokens", "--record", str(path))
    with front, other:
        front.wait_ready()
        other.wait_ready()
        client = hosts[1]  # over the cable too
        for rank in (0, 1):
            body = {"text": PROMPTS, "sampling_params": GREEDY, "routed_dp_rank": rank}
            status, outputs = client.post(f"{front.url}/generate", body)
            assert status == 200 and [output["output_ids"] for output in outputs] == alone
            assert {output["meta_info"]["dp_rank"] for output in outputs} == {rank}
        for number in range(3):
            time.sleep(0.3)  # idle ranks tell their loads
            body = {"text": "z", "sampling_params": GREEDY, "rid": f"z{number}"}
            assert client.post(f"{front.url}/generate", body)[0] == 200
        assert client.get(f"{other.url}/health")[0] == 200
        children = [*front.children().values(), *other.children().values()]
        front.signal(signal.SIGTERM)
        assert (front.wait(60), other.wait(60)) == (0, 0)
        assert gone(children) and front.leftovers() == other.leftovers() == []
    check_recording(path)


def check_recording(path: Path) -> None:
    """Whole, of both ranks, on one clock; the loads of the other host were known when the last one was sent."""
    rec = sgviz.load(path)
    assert rec.audit().findings == () and rec.check() == []
    started = [event.body for event in rec.stamped() if isinstance(event.body, ProcessStarted)]
    names = {body.component for body in started}
    assert {"scheduler-0", "scheduler-1", "data_parallel_controller", "detokenizer"} <= names
    stamps = [body.monotonic_ns for body in started]
    for event in rec.stamped():
        stamps += [
            event.t,
            *(getattr(event.body, name, 0) for name in ("start_ns", "end_ns", "forward_end_ns")),
        ]
    assert max(stamps) - min(filter(None, stamps)) < 300 * 10**9
    chosen = [event.body for event in rec.stamped() if isinstance(event.body, DpChose)]
    believed = [
        dict(zip((0, 1), (each[2] for each in body.candidates))) for body in chosen if body.rid[0] == "z"
    ]
    assert any(requests[1] == 0 for requests in believed)  # not the six it was sent: it has told of itself
    for rid in rec.requests["rid"]:  # no effect is older than its cause, on whichever host
        stats = rec.request(rid).stats
        way = [stats.created, stats.scheduler_recv, stats.wait_queue_entry, stats.forward_entry]
        way += [stats.completion, stats.finished]
        assert way == sorted(way) and all(way), rid


def test_a_cut_cable_costs_the_ranks_behind_it(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    front, other = start(hosts, "--device", "mock", "--mock-step-ms", "20")
    with front, other:
        front.wait_ready()
        other.wait_ready()
        children = list(other.children().values())
        long = {"max_new_tokens": 400, "ignore_eos": True}
        calls = [
            first.ask(
                "POST", f"{front.url}/generate",
                {"text": "go on", "stream": True, "sampling_params": long, "routed_dp_rank": rank},
            )
            for rank in (0, 1)
        ]  # fmt: skip
        for call in calls:
            call.wait_lines(3)
        cut = time.monotonic()
        second.cut()
        _, text = calls[1].end(SILENCE_S + 10)
        assert time.monotonic() - cut < SILENCE_S + 5
        assert "data parallel rank 1" in text and "node 1 gave no sign of life for 3 s" in text
        assert other.wait(SILENCE_S + 10) == 1 and gone(children) and other.leftovers() == []
        assert (
            f"node 0 at {first.address}:{PORT} gave no sign of life for 3 s; this node ends" in other.text()
        )
        second.mend()
        status, text = calls[0].end()
        assert status == 200 and json.loads(text.splitlines()[-3].removeprefix("data: "))
        outputs = [
            first.post(f"{front.url}/generate", {"text": "x"})[1]["meta_info"]["dp_rank"] for _ in range(3)
        ]
        assert outputs == [0, 0, 0]
        assert first.get(f"{front.url}/health")[0] == 200
        front.signal(signal.SIGTERM)
        assert front.wait(60) == 0
