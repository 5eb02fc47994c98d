"""A client that hangs up: its request ends at once, once, and others run on. Real sockets."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from serving_tools import Served, chat, text, until

CASES = [
    ("/v1/chat/completions", chat()),
    ("/v1/chat/completions", chat(n=2)),
    ("/v1/completions", text(prompt=["a", "b"])),
    ("/generate", {"text": "hi"}),
]


def connect(server: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave the answer unread."""
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(raw)}", "\r\n"])
    sock = socket.create_connection((server.handle.host, server.handle.port), timeout=5)
    sock.sendall(head.encode() + raw)
    return sock


@pytest.mark.parametrize(("path", "body"), CASES)
@pytest.mark.parametrize("streamed", [False, True])
def test_hang_up(server: Served, path: str, body: dict[str, Any], streamed: bool) -> None:
    manager = server.manager
    manager.gate = threading.Event()
    number = "_0" if isinstance(body.get("prompt"), list) else ""  # a prompt of a list has a rid of its own
    sock = connect(server, path, {**body, "rid": "leaver", "stream": streamed})
    assert until(lambda: bool(manager.live))
    rids = set(manager.live)
    if streamed:
        _read_until(sock, b"alpha")
    other = connect(server, path, {**body, "rid": "stays", "stream": streamed})
    assert until(lambda: len(manager.live) == 2 * len(rids))
    sock.close()
    assert until(lambda: not rids & manager.live)
    assert sorted(manager.closed_early) == sorted(rids)
    assert until(lambda: (f"leaver{number}", 499) in manager.sent)
    manager.gate.set()
    assert b"200 OK" in _read_until(other, b"epsilon")
    assert until(lambda: (f"stays{number}", 200) in manager.sent)
    other.close()
    assert len(manager.sent) == len(dict(manager.sent))
    assert sorted(manager.closed_early) == sorted(rids)


def test_a_normal_end_aborts_nothing(server: Served) -> None:
    for path, body in CASES:
        for streamed in (False, True):
            assert server.http.post(path, json={**body, "stream": streamed}).status_code == 200
    assert not server.manager.closed_early and not server.manager.live and not server.manager.aborts


def test_hang_up_before_the_body_is_complete(server: Served) -> None:
    sock = socket.create_connection((server.handle.host, server.handle.port), timeout=5)
    sock.sendall(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    sock.close()
    assert server.http.post("/generate", json={"text": "a"}).status_code == 200
    assert len(server.manager.requests) == 1


def _read_until(sock: socket.socket, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        piece = sock.recv(4096)
        assert piece, seen
        seen += piece
    return seen
