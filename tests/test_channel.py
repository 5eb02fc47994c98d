"""Sockets at which other hosts arrive: what strangers say there, and that it ends or takes nothing."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

sys.path.append(str(Path(__file__).resolve().parent / "launch"))

from free_ports import free_row

from sgviz.channel import AsyncReceiver, Receiver, Sender, bind_tcp

HOST = "127.0.0.1"
# a port scan, a browser, and bytes that ZeroMQ's first protocol takes for a greeting and messages
STRANGERS = (
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\x01\x00\x05\x00junk\x05\x00junk",
    bytes(range(1, 255)),
)
WAIT_MS = 10_000
QUIET_MS = 200


class Word(msgspec.Struct, tag=True):
    text: str


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


def strangers(port: int) -> list[socket.socket]:
    """They stay connected."""
    found = [socket.create_connection((HOST, port), timeout=10) for _ in STRANGERS]
    for each, said in zip(found, STRANGERS, strict=True):
        each.sendall(said)
    return found


def turned_away(found: list[socket.socket]) -> bool:
    """Each connection is closed by the other end (which may have greeted before)."""
    for each in found:
        each.settimeout(WAIT_MS / 1000)
        try:
            while each.recv(256):
                pass
        except ConnectionResetError:
            pass
        each.close()
    return True


def test_bytes_of_another_protocol_are_no_messages(context: zmq.Context[Any]) -> None:
    port = free_row(1)
    address = f"tcp://{HOST}:{port}"
    inbox: Receiver[Word] = Receiver(context, address, Word, bind=True)
    assert turned_away(strangers(port))
    assert not inbox.wait(QUIET_MS)
    sender = Sender(context, address)
    sender.send(Word("hello"))
    assert inbox.wait(WAIT_MS) and inbox.drain() == [Word("hello")]


def test_a_stranger_is_no_peer_that_messages_are_shared_out_to(context: zmq.Context[Any]) -> None:
    port = free_row(1)
    address = f"tcp://{HOST}:{port}"
    sender = Sender(context, address, bind=True)
    there = strangers(port)
    assert not sender.wait_for_peer(QUIET_MS)
    inbox: Receiver[Word] = Receiver(context, address, Word)
    assert sender.wait_for_peer(WAIT_MS)
    sent = [Word(str(number)) for number in range(20)]
    for word in sent:
        sender.send(word)
    got: list[Word] = []
    while len(got) < len(sent):
        assert inbox.wait(WAIT_MS), "some went to a stranger"
        got += inbox.drain()
    assert got == sent and turned_away(there)


def test_a_router_hears_no_stranger(context: zmq.Context[Any]) -> None:
    port = free_row(1)
    desk: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    bind_tcp(desk, f"tcp://{HOST}:{port}")
    assert turned_away(strangers(port)) and not desk.poll(QUIET_MS)


def test_what_is_no_message_is_left_out_where_other_hosts_may_send(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://{HOST}:{free_row(1)}"
    inbox: Receiver[Word] = Receiver(context, (address, "inproc://too"), Word, bind=True)
    speak(context, address)
    got: list[Word] = []
    while not got:
        assert inbox.wait(WAIT_MS)
        got = inbox.drain()
    assert got == [Word("hello")]
    assert "4 bytes at a port for other hosts are no message of the engine" in caplog.text


def test_so_it_is_in_a_loop(context: zmq.Context[Any]) -> None:
    address = f"tcp://{HOST}:{free_row(1)}"

    async def first() -> Word:
        inbox: AsyncReceiver[Word] = AsyncReceiver(context, (address, "inproc://too"), Word, bind=True)
        speak(context, address)
        try:
            return await asyncio.wait_for(inbox.recv(), WAIT_MS / 1000)
        finally:
            inbox.close()

    assert asyncio.run(first()) == Word("hello")


def speak(context: zmq.Context[Any], address: str) -> None:
    """Something that is no message, and one."""
    peer: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    peer.connect(address)
    peer.send(b"junk")
    peer.send(msgspec.msgpack.encode(Word("hello")))


def test_between_components_of_one_host_it_is_a_fault(context: zmq.Context[Any]) -> None:
    inbox: Receiver[Word] = Receiver(context, "inproc://here", Word, bind=True)
    peer: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    peer.connect("inproc://here")
    peer.send(b"junk")
    assert inbox.wait(WAIT_MS)
    with pytest.raises(msgspec.DecodeError):
        inbox.drain()
