"""What the load tests share: a client that costs little, and the memory of a server's processes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
from server_process import ServerProcess


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, and after how many seconds."""

    status: int
    body: dict[str, Any]
    seconds: float


async def post(url: str, body: dict[str, Any], path: str = "/generate") -> Reply:
    """One request over a connection of its own."""
    place, data, start = urlsplit(url), json.dumps(body).encode(), time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = [
        f"POST {path} HTTP/1.1", f"Host: {place.netloc}", "Content-Type: application/json",
        f"Content-Length: {len(data)}", "Connection: close", "", "",
    ]  # fmt: skip
    writer.write("\r\n".join(head).encode() + data)
    try:
        head_came = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    finally:
        writer.close()
    return Reply(int(head_came.split(b" ", 2)[1]), json.loads(rest), time.perf_counter() - start)


def processes_of(server: ServerProcess) -> dict[str, psutil.Process]:
    """The server itself and its children, by name."""
    return {"server": psutil.Process(server.process.pid), **server.children()}


def resident_mib(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: process.memory_info().rss / 2**20 for name, process in processes.items()}


def open_files(processes: dict[str, psutil.Process]) -> dict[str, int]:
    """File descriptors, sockets included."""
    return {name: process.num_fds() for name, process in processes.items()}


async def state_of(url: str) -> dict[str, Any]:
    """The scheduler's account, with what the two managers know."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(f"GET /server_info HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n".encode())
    try:
        raw = await reader.read()
    finally:
        writer.close()
    state: dict[str, Any] = json.loads(raw.partition(b"\r\n\r\n")[2])["internal_states"][0]
    return state


async def until_empty(url: str, seconds: float = 60.0) -> dict[str, Any]:
    """Wait until no component knows any request; the state then."""
    deadline = time.monotonic() + seconds
    while True:
        state = await state_of(url)
        known = [
            state[name] for name in ("num_live_reqs", "num_tokenizer_manager_reqs", "num_detokenizer_reqs")
        ]
        if not any(known):
            assert state["protected_tokens"] == state["private_tokens"] == 0
            return state
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.05)
