"""The life of a server's processes: signals, deaths, bad starts, and what lies around from dead servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import Background, ServerProcess, gone

pytestmark = pytest.mark.slow
MOCK = ("--device", "mock", "--mock-step-ms", "10")
WITHIN_S = 3.0


def body(tokens: int, **more: object) -> dict:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"text": "hello", "sampling_params": params, **more}


def stream(server: ServerProcess, opened: threading.Semaphore | None = None) -> list[str]:
    """The data of every event of a long stream, until it ends; `opened` is released at the first."""
    events: list[str] = []
    with httpx.stream("POST", f"{server.url}/generate", json=body(1900, stream=True), timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                if opened is not None and len(events) == 1:
                    opened.release()
    return events


def live(server: ServerProcess) -> int:
    return httpx.get(f"{server.url}/server_info").json()["internal_states"][0]["num_live_reqs"]


def until_live(server: ServerProcess, number: int) -> None:
    deadline = time.monotonic() + 20
    while live(server) < number:
        assert time.monotonic() < deadline


def test_sigterm_lets_running_ones_finish_refuses_new_ones_and_frees_the_port() -> None:
    """Within the grace time running requests end well, new ones are refused, the tree exits 0 and the port is free.
    sgl-project/sglang#1838, smg-project/smg#1172
    """
    with ServerProcess(*MOCK) as server:
        children, port = list(server.children().values()), server.port
        call = Background(lambda: httpx.post(f"{server.url}/generate", json=body(120), timeout=60))
        until_live(server, 1)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        with contextlib.suppress(httpx.ConnectError):  # or the port is closed already
            assert httpx.post(f"{server.url}/generate", json=body(3), timeout=10).status_code == 503
        assert server.wait() == 0
        call.join(5)
        assert call.result.json()["meta_info"]["completion_tokens"] == 120
        assert gone(children) and server.leftovers() == []
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_sigterm_does_not_wait_longer_than_the_grace_time() -> None:
    """A request that would take longer is ended with a clean answer. sgl-project/sglang#1838"""
    with ServerProcess(*MOCK, "--shutdown-grace", "0.5") as server:
        call = Background(lambda: stream(server))
        until_live(server, 1)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        call.join(5)
        assert call.error is None
        last = [event for event in call.result if event != "[DONE]"][-1]
        assert "abort" in last or json.loads(last)["error"]["code"] == 503


@pytest.mark.parametrize("component", ["scheduler", "detokenizer"])
def test_a_dead_process_is_an_error_for_everybody_within_seconds(component: str) -> None:
    """An error event in every open stream, an unhealthy /health (or a closed port), a non-zero exit, nothing left.
    sgl-project/sglang#18421, sgl-project/sglang#18579, sgl-project/sglang#21486, mozilla-ai/any-llm#847,
    openai/openai-python#3038
    """
    with ServerProcess(*MOCK) as server:
        children = server.children()
        opened = threading.Semaphore(0)
        calls = [Background(lambda: stream(server, opened)) for _ in range(10)]
        whole = Background(lambda: httpx.post(f"{server.url}/generate", json=body(1900), timeout=60))
        until_live(server, 11)
        assert all(opened.acquire(timeout=20) for _ in calls)  # before that it would be a 503 and no event
        children[component].kill()
        killed = time.monotonic()
        with contextlib.suppress(httpx.TransportError):  # or the port is closed already
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 503
        for call in (*calls, whole):
            call.join(10)
        assert time.monotonic() - killed < WITHIN_S
        for call in calls:
            assert call.error is None
            error = json.loads(call.result[-1])["error"]
            assert error["code"] == 503 and f"{component} died (signal SIGKILL)" in error["message"]
        assert whole.result.status_code == 503
        assert server.wait() == 1
        assert gone(list(children.values())) and server.leftovers() == []


BAD_STARTS = {
    "no model": (["--model-path", "/no/such/model"], "/no/such/model"),
    "wrong setting": (["--page-size", "0"], "page_size"),
    "pool too small": (["--max-total-tokens", "16", "--page-size", "16"], "16 tokens"),
    "no such host": (["--host", "256.1.1.1"], "256.1.1.1"),
    "unknown policy": (["--schedule-policy", "fcsf"], "did you mean 'fcfs'"),
}


@pytest.mark.parametrize("case", BAD_STARTS)
def test_a_start_that_cannot_succeed_is_a_quick_clear_error(case: str) -> None:
    """A sentence, a non-zero exit, no process and no file left. sgl-project/sglang#21320,
    sgl-project/sglang#40627
    """
    flags, said = BAD_STARTS[case]
    with ServerProcess(*flags, wait=False) as server:
        assert server.wait(60) not in (0, None)
        assert said in server.text() and "Traceback" not in server.text()
        assert server.leftovers() == []


def test_a_taken_port_is_never_exchanged_for_another() -> None:
    """sgl-project/sglang#40627"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess("--port", str(port), wait=False) as server:
            assert server.wait(60) == 1
            assert f"cannot listen on 127.0.0.1:{port}" in server.text() and "is ready" not in server.text()


def test_a_child_that_dies_while_it_loads_is_a_failed_start(tmp_path: Path) -> None:
    """Weights that cannot be loaded: an error that names them. sgl-project/sglang#21320"""
    import sgviz

    source = Path(sgviz.__file__).parents[1] / "data/tiny-llama"
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes()[:1000])
    with ServerProcess(model=str(tmp_path), wait=False) as server:
        assert server.wait(60) == 1
        assert re.search(r"the scheduler could not start: \w+: .", server.text()), server.text()
        assert "Traceback" not in server.text() and server.leftovers() == []


def test_nothing_stays_after_a_clean_stop_and_the_port_answers_only_its_own() -> None:
    """No leftover socket files, and two servers on one host share nothing. zeromq/libzmq#3204,
    zeromq/libzmq#3387, smg-project/smg#2076, sgl-project/sglang-omni#263
    """
    with ServerProcess(*MOCK) as a, ServerProcess(*MOCK, folder=a.sockets) as b:
        assert len(a.leftovers()) == 2, "both have their sockets in one folder"
        call = Background(lambda: httpx.post(f"{a.url}/generate", json=body(200, rid="same"), timeout=60))
        until_live(a, 1)
        assert live(b) == 0
        assert httpx.post(f"{b.url}/abort_request", json={"rid": "same"}).status_code == 200
        b.signal(signal.SIGTERM)
        assert b.wait() == 0 and len(a.leftovers()) == 1
        call.join(20)
        assert call.result.json()["meta_info"]["finish_reason"]["type"] == "length"
        a.signal(signal.SIGINT)
        assert a.wait() == 0 and a.leftovers() == []
        assert [name for name in os.listdir(a.sockets) if name.startswith("sgviz")] == []
