"""What a client may leave half-said, and how much it may say: heads, bodies, silence. Raw sockets throughout."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serving_tools import MODEL, Served, chat, error_of, served, until

from sgviz.config import HttpConfig
from sgviz.serving.http_protocol import MAX_HEAD_BYTES

PATH = "/v1/chat/completions"
LIMIT = 1 << 20
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    """A server that is quick to lose patience."""
    with served(http=HttpConfig(max_body_mb=1.0, read_timeout=0.4, timeout_keep_alive=0.4)) as server:
        yield server


@pytest.fixture
def line(guarded: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", guarded.handle.port), timeout=10) as connection:
        yield connection
    guarded.reset()


def said(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    out = b""
    while piece := connection.recv(1 << 16):
        out += piece
    return out


def answer(raw: bytes) -> tuple[int, dict[str, bytes], dict[str, Any]]:
    """Status, headers and JSON body of the one answer in `raw`."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {
        name.decode().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
    }
    assert len(body) == int(headers["content-length"])
    return int(first.split()[1]), headers, json.loads(body)


def is_refusal(raw: bytes, status: int, words: str) -> bool:
    got, headers, body = answer(raw)
    assert (got, headers["connection"], headers["content-type"]) == (status, b"close", b"application/json")
    assert body["error"]["code"] == status and words in body["error"]["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return True


def body_of(size: int) -> bytes:
    """A chat body of exactly so many bytes."""
    body = json.dumps(chat(max_tokens=1, user="")).encode()
    return body.replace(b'"user": ""', b'"user": "%b"' % (b"x" * (size - len(body))))


def test_a_body_of_exactly_the_limit_is_taken(guarded: Served) -> None:
    response = guarded.http.post(PATH, content=body_of(LIMIT), headers={"content-type": "application/json"})
    assert response.status_code == 200
    guarded.reset()


def test_a_body_above_the_limit_is_413_and_the_client_sees_it_though_it_sends_on(guarded: Served) -> None:
    response = guarded.http.post(
        PATH, content=body_of(LIMIT + 1), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413 and response.headers["connection"] == "close"
    assert f"{LIMIT + 1} bytes" in error_of(response)["message"]
    assert "max_body_mb" in error_of(response)["message"]
    assert not guarded.manager.requests


def test_a_length_above_the_limit_is_refused_before_a_byte_of_the_body(line: socket.socket) -> None:
    line.sendall(HEAD + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n")
    assert is_refusal(said(line), 413, "99999999 bytes")


def test_a_body_without_length_is_counted_while_it_is_read(line: socket.socket, guarded: Served) -> None:
    line.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(LIMIT // 0x10000 + 1):
        line.sendall(piece)
    line.sendall(b"0\r\n\r\n")
    assert is_refusal(said(line), 413, f"more than {LIMIT} bytes")
    assert not guarded.manager.requests


def test_a_chunked_body_within_the_limit_is_taken(guarded: Served) -> None:
    pieces = iter([body_of(500)[:100], body_of(500)[100:]])
    response = guarded.http.post(PATH, content=pieces, headers={"content-type": "application/json"})
    assert response.status_code == 200
    guarded.reset()


@pytest.mark.parametrize("head", [b"P", b"POST /v1/chat", HEAD, HEAD + b"X-Half"])
def test_half_a_head_is_408(line: socket.socket, head: bytes) -> None:
    line.sendall(head)
    assert is_refusal(said(line), 408, "the head of the request did not end within 0.4 s")


def test_a_head_that_drips_does_not_buy_time(line: socket.socket) -> None:
    dripping = threading.Event()

    def drip() -> None:
        for byte in HEAD:
            if dripping.wait(0.05):
                return
            try:
                line.sendall(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        first = line.recv(1 << 16)
    finally:
        dripping.set()
        thread.join()
    assert first.startswith(b"HTTP/1.1 408 ")


def test_a_silent_connection_is_closed_without_a_word(line: socket.socket) -> None:
    assert said(line) == b""


def test_blank_lines_are_no_request(line: socket.socket) -> None:
    line.sendall(b"\r\n\r\n")
    assert said(line) == b""


def test_a_head_without_end_is_431(line: socket.socket) -> None:
    line.sendall(HEAD + b"X-Long: " + b"a" * (MAX_HEAD_BYTES + 100))
    assert is_refusal(said(line), 431, f"more than {MAX_HEAD_BYTES} bytes")


def ready_of(size: int) -> bytes:
    """A whole request whose head has exactly so many bytes."""
    begin, end = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: ", b"\r\n\r\n"
    return begin + b"a" * (size - len(begin) - len(end)) + end


def test_a_whole_head_of_the_limit_is_taken(line: socket.socket) -> None:
    line.sendall(ready_of(MAX_HEAD_BYTES))
    assert said(line).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES + 1, 100_000, 200_000])
def test_a_whole_head_above_the_limit_is_431_though_it_comes_at_once(line: socket.socket, size: int) -> None:
    line.sendall(ready_of(size))
    assert is_refusal(said(line), 431, f"more than {MAX_HEAD_BYTES} bytes")


def test_many_small_headers_and_a_long_path_count_too(line: socket.socket) -> None:
    line.sendall(b"GET /ready?%b HTTP/1.1\r\nHost: x\r\n" % (b"q" * 30_000) + b"a: b\r\n" * 6000 + b"\r\n")
    assert is_refusal(said(line), 431, f"more than {MAX_HEAD_BYTES} bytes")


def test_trailers_without_end_are_431(line: socket.socket, guarded: Served) -> None:
    line.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-Trailer: yes\r\n" * 5000)
    assert is_refusal(said(line), 431, f"more than {MAX_HEAD_BYTES} bytes")
    assert not guarded.manager.requests


def answers_of(raw: bytes) -> list[int]:
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


def test_the_body_before_a_pipelined_head_is_not_counted_with_it(line: socket.socket) -> None:
    """Half a head behind the last 200,000 bytes of a body, then the other half."""
    body = body_of(200_000)
    line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /ready HTTP/1.1\r\nHo")
    line.sendall(b"st: x\r\nConnection: close\r\n\r\n")
    assert answers_of(said(line)) == [200, 200]


def test_pipelined_requests_are_answered_in_turn_and_each_head_is_measured_alone(line: socket.socket) -> None:
    one = ready_of(40_000).replace(b"Connection: close", b"Connection: alive")
    line.sendall(one * 4 + ready_of(40_000))
    assert answers_of(said(line)) == [200] * 5


@pytest.mark.parametrize(
    ("behind", "status"), [(ready_of(100_000), 431), (b"\x16\x03\x01 hello\r\n\r\n", 400)]
)
def test_a_refusal_behind_a_running_answer_does_not_cut_it(
    line: socket.socket, guarded: Served, behind: bytes, status: int
) -> None:
    guarded.manager.gate = threading.Event()
    body = json.dumps(chat(stream=True)).encode()
    line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + behind)
    assert until(lambda: bool(guarded.manager.live))
    guarded.manager.gate.set()
    streamed, _, rest = said(line).partition(b"0\r\n\r\n")
    assert streamed.startswith(b"HTTP/1.1 200 ") and b"[DONE]" in streamed
    assert is_refusal(rest, status, "")


def test_what_is_no_http_is_400_in_the_one_shape(line: socket.socket) -> None:
    line.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    assert is_refusal(said(line), 400, "no HTTP request")


def test_half_a_body_is_408(line: socket.socket, guarded: Served) -> None:
    line.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert is_refusal(said(line), 408, "1 bytes came within 0.4 s")
    assert not guarded.manager.requests


def test_a_client_that_leaves_within_its_body_is_forgotten(line: socket.socket, guarded: Served) -> None:
    line.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    line.close()
    assert guarded.http.get("/ready").status_code == 200 and not guarded.manager.requests


def test_an_idle_connection_is_closed_after_its_time(line: socket.socket) -> None:
    line.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    assert said(line).startswith(b"HTTP/1.1 200 ")


def test_half_a_request_behind_a_running_answer_does_not_cut_it(line: socket.socket, guarded: Served) -> None:
    guarded.manager.gate = threading.Event()
    body = json.dumps(chat(stream=True)).encode()
    line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /rea")
    assert until(lambda: bool(guarded.manager.live))
    threading.Event().wait(1.0)  # more than twice the patience
    guarded.manager.gate.set()
    raw = said(line)
    streamed, _, rest = raw.partition(b"0\r\n\r\n")
    assert streamed.startswith(b"HTTP/1.1 200 ") and b"[DONE]" in streamed
    assert rest.startswith(b"HTTP/1.1 408 ")


def test_requests_on_one_connection_follow_one_another(guarded: Served) -> None:
    for _ in range(3):
        assert guarded.http.post(PATH, json=chat()).json()["model"] == MODEL
    guarded.reset()
