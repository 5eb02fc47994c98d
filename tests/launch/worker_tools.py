"""Talking to a server of tokenizer workers, each time over a connection of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from server_process import ServerProcess

import sgviz

WORKERS = ("--tokenizer-worker-num", "2")
LONG = {"max_new_tokens": 1900, "temperature": 0, "ignore_eos": True}


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    """Over a connection of its own, so that the kernel chooses a worker anew."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def state(server: ServerProcess) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/server_info", timeout=60)
    inner: dict[str, Any] = answer.json()["internal_states"][0]
    return inner


def eventually(holds: Any, tries: int = 200) -> None:
    for _ in range(tries):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to be so")


def recording_of(server: ServerProcess) -> sgviz.Recording:
    """All that has happened so far."""
    link = sgviz.connect(server.url)
    frozen = link.freeze()
    link.close()
    return frozen


def idle(server: ServerProcess) -> bool:
    now = state(server)
    return now["num_tokenizer_manager_reqs"] == 0 and now["num_running_reqs"] == 0


def slow(server: ServerProcess, seconds: float | None = 0.02) -> None:
    """Each forward takes at least so long, so that a long answer is under way for as long as a test needs it."""
    assert post(server, "/slow_down", forward_sleep_time=seconds).status_code == 200


@contextmanager
def open_stream(server: ServerProcess, rid: str, **params: Any) -> Iterator[Iterator[str]]:
    """A long streamed answer that has begun; the lines of the rest of it."""
    slow(server)
    body = {"text": "go on", "rid": rid, "stream": True, "sampling_params": {**LONG, **params}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        try:
            yield lines
        finally:
            answer.close()
