"""A disk that is full while a server records: it serves on and says so, and the file can be read."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

from sgviz.recording import load

pytestmark = pytest.mark.slow
MOCK = ("--device", "mock", "--mock-step-ms", "1")
BODY = {
    "input_ids": [5] * 20,
    "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
}
ROOM = 20_000  # bytes that still fit


def ask(server: ServerProcess) -> str:
    answer = httpx.post(f"{server.url}/generate", json=BODY, timeout=60)
    assert answer.status_code == 200
    return answer.json()["text"]


def until_said(server: ServerProcess, words: str) -> None:
    deadline = time.monotonic() + 30
    while words not in server.text():
        assert time.monotonic() < deadline, server.text()
        ask(server)


def leave(server: ServerProcess) -> None:
    """The server ends in order, although its recording is not whole; nobody needs to read a traceback."""
    server.signal(signal.SIGTERM)
    assert server.wait() == 1
    assert "is incomplete" in server.text() and "Traceback" not in server.text()
    assert server.leftovers() == []


def test_a_disk_that_is_full_from_the_beginning() -> None:
    with ServerProcess(*MOCK, "--record", "/dev/full") as server:
        first = ask(server)
        until_said(server, "the recording '/dev/full' stops here: [Errno 28] No space left on device")
        assert ask(server) == first
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        leave(server)


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    file = tmp_path / "run.sgv"
    with ServerProcess(*MOCK, "--record", str(file)) as server:
        first = ask(server)
        time.sleep(0.5)  # so much of it is written
        limit = max(file.stat().st_size, server.log.stat().st_size) + ROOM
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        until_said(server, "stops here: [Errno 27] File too large")
        assert ask(server) == first
        live = httpx.get(f"{server.url}/sgviz/state", timeout=30)
        assert live.status_code == 200, "what is shown live does not depend on the file"
        leave(server)
    rec = load(file)
    done = rec.requests[rec.requests.finish_reason == "length"]
    assert file.stat().st_size <= limit and len(done) >= 1
    assert (done.completion_tokens == 40).all(), "what was written before is whole"
