"""Processes that are stopped for a while or killed: what stalls goes on, what dies is told, nothing is lost or left."""

from __future__ import annotations

import json
import signal
import threading
import time
from itertools import pairwise

import httpx
import psutil
import pytest
from server_process import Background, ServerProcess, gone

pytestmark = pytest.mark.slow
MOCK = ("--device", "mock", "--mock-step-ms", "10")
STREAMS = 8
TOKENS = 300
STOPPED_S = 5.0
CHILDREN = ("scheduler", "detokenizer")


def body(number: int, tokens: int = TOKENS) -> dict:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": [20 + number] * 5, "sampling_params": params}


class Stream:
    """Reads one answer as it comes."""

    def __init__(self, server: ServerProcess, number: int, tokens: int = TOKENS) -> None:
        self.outputs: list[dict] = []
        self.opened = threading.Event()
        self.reader = Background(lambda: self._read(server, number, tokens))

    def _read(self, server: ServerProcess, number: int, tokens: int) -> None:
        asked = {**body(number, tokens), "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=asked, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self.outputs.append(json.loads(line[6:]))
                    self.opened.set()


@pytest.mark.parametrize("stopped", [*CHILDREN, "both"])
def test_a_stopped_child_stalls_the_streams_and_nothing_is_lost(stopped: str) -> None:
    with ServerProcess(*MOCK) as server:
        prompts = [body(number)["input_ids"] for number in range(STREAMS)]
        wanted = httpx.post(
            f"{server.url}/generate", json={**body(0), "input_ids": prompts}, timeout=60
        ).json()
        children = server.children()
        halted = [children[name] for name in CHILDREN if stopped in (name, "both")]
        streams = [Stream(server, number) for number in range(STREAMS)]
        assert all(stream.opened.wait(30) for stream in streams)
        for child in halted:
            child.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # what was on its way arrives
        before = [len(stream.outputs) for stream in streams]
        time.sleep(STOPPED_S - 0.5)
        assert [len(stream.outputs) for stream in streams] == before, "they stand still"
        assert server.process.poll() is None and all(child.is_running() for child in halted)
        for child in halted:
            child.send_signal(signal.SIGCONT)
        for stream, whole in zip(streams, wanted, strict=True):
            stream.reader.join(60)
            assert stream.reader.error is None
            texts = [output["text"] for output in stream.outputs]
            assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
            assert texts[-1] == whole["text"] and stream.outputs[-1]["output_ids"] == whole["output_ids"]
            assert stream.outputs[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0 and server.leftovers() == []


def children_of(*flags: str) -> list[str]:
    with ServerProcess(*MOCK, *flags) as server:
        return list(server.children())


def test_each_child_killed_in_turn_is_told_to_everybody_and_leaves_nothing() -> None:
    names = children_of()
    assert set(CHILDREN) <= set(names)
    for name in names:
        with ServerProcess(*MOCK) as server:
            children = server.children()
            stream = Stream(server, 0, 1900)
            whole = Background(lambda: httpx.post(f"{server.url}/generate", json=body(1, 1900), timeout=60))
            assert stream.opened.wait(30)
            children[name].kill()
            stream.reader.join(10)
            whole.join(10)
            error = stream.outputs[-1]["error"]
            assert error["code"] == 503 and f"{name} died (signal SIGKILL)" in error["message"], name
            assert whole.result.status_code == 503, name
            assert server.wait() == 1 and gone(list(children.values())) and server.leftovers() == [], name


RAISING_FORWARD = """
from sgviz.worker.mock_worker import MockWorker
inner = MockWorker._forward
def raising(self, forward):
    if any(len(req.origin_input_ids) == 66 for req in forward.reqs):
        raise ArithmeticError("the kernel went wrong")
    return inner(self, forward)
MockWorker._forward = raising
class Policy:
    name = "as they come"
    def order(self, waiting, view): return waiting
"""


@pytest.mark.parametrize("loop", [[], ["--disable-overlap-schedule"]], ids=["overlap", "normal"])
def test_a_forward_that_raises_as_a_whole_ends_the_server_with_the_cause(
    tmp_path: object, loop: list[str]
) -> None:
    """Whose fault it is cannot be told, nor what the device still holds: everybody gets 503, and the exit code is 1."""
    file = f"{tmp_path}/breaks_the_worker.py"
    with open(file, "w") as out:
        out.write(RAISING_FORWARD)
    with ServerProcess(*MOCK, *loop, "--schedule-policy", f"{file}:Policy") as server:
        children = list(server.children().values())
        stream = Stream(server, 0, 1900)
        assert stream.opened.wait(30)
        fatal = {**body(0, 3), "input_ids": [5] * 66}
        answer = httpx.post(f"{server.url}/generate", json=fatal, timeout=60)
        assert answer.status_code == 503 and "ArithmeticError: the kernel went wrong" in answer.text
        stream.reader.join(10)
        assert "ArithmeticError" in stream.outputs[-1]["error"]["message"]
        assert server.wait() == 1 and gone(children) and server.leftovers() == []


def test_a_suspended_machine_is_no_dead_engine() -> None:
    """All processes stopped together, as when a lid is closed: they go on where they were."""
    with ServerProcess(*MOCK, "--watchdog-timeout", "2") as server:
        stream = Stream(server, 0)
        assert stream.opened.wait(30)
        family = [*server.children().values(), psutil.Process(server.process.pid)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        for process in reversed(family):
            process.send_signal(signal.SIGCONT)
        stream.reader.join(60)
        assert stream.reader.error is None
        assert len(stream.outputs[-1]["output_ids"]) == TOKENS
