"""NodeLink: the other nodes' end of what the nodes of an engine say to each other.

Mirrors what SGLang leaves to torch's rendezvous. Imports: config, data_parallel (nodes), launch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

import sgviz
from sgviz.config import Settings
from sgviz.data_parallel.nodes import Value, meeting_address
from sgviz.errors import StartupError
from sgviz.launch.lived import Lived
from sgviz.launch.node_messages import (
    BEATS,
    AskClock,
    Beat,
    Bye,
    Join,
    Leaving,
    Refused,
    TellClock,
    ToNode,
    ToNodeZero,
    Welcome,
)

log = logging.getLogger(__name__)

POLL_MS = 100
AGAIN_S = 1.0  # between two tries to join
CONNECT_MS = 2000  # after which a connection that does not come about is tried again
CLOCK_ROUNDS = 16
LAST_WORDS_MS = 500


class NodeLink:
    """Joins; after `start` it keeps in touch from a thread of its own until `close`."""

    def __init__(self, context: zmq.Context[Any], settings: Settings, agree: dict[str, Value]) -> None:
        self._parallel = settings.parallel
        self._agree = agree
        self._where = f"node 0 at {self._parallel.dist_init_addr}"
        self._limit = self._parallel.node_heartbeat_timeout
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToNode).decode
        self._out: SimpleQueue[ToNodeZero] = SimpleQueue()
        self._closing: Leaving | None = None
        self._thread: threading.Thread | None = None
        address = meeting_address(self._parallel)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.set(zmq.IPV6, "[" in address)
        self._socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._socket.set(zmq.IDENTITY, b"n" + os.urandom(16))
        self._socket.connect(address)

    # ------------------------------------------------------------------ before the thread

    def join(self) -> Welcome:
        """Wait for node 0, `node_timeout` seconds at most.

        Raises:
            StartupError: it did not answer, or refused.
        """
        message = Join(node_rank=self._parallel.node_rank, version=sgviz.__version__, agree=self._agree)
        until = time.monotonic() + self._parallel.node_timeout
        while (left := until - time.monotonic()) > 0:
            self._send(message)
            answer = self._receive(min(AGAIN_S, left))
            if isinstance(answer, Welcome):
                return answer
            self._check(answer)
        limit = self._parallel.node_timeout
        raise StartupError(f"{self._where} did not answer within {limit:g} s (node_timeout)")

    def clock_shift_ns(self) -> int:
        """What is to be added to the monotonic clock of this host to get that of node 0.

        It is off by half of the way there and back at most, and never makes an answer older than its question. 0 if
        the two cannot be told apart, as on one host.

        Raises:
            StartupError: node 0 did not answer.
        """
        found: list[tuple[int, int]] = []  # the time there and back, the shift
        deadline = time.monotonic() + self._limit
        while len(found) < CLOCK_ROUNDS and time.monotonic() < deadline:
            sent = time.monotonic_ns()
            self._send(AskClock(sent_ns=sent))
            answer = self._receive(AGAIN_S)
            while answer is not None and not (isinstance(answer, TellClock) and answer.sent_ns == sent):
                self._check(answer)
                answer = self._receive(AGAIN_S)
            if isinstance(answer, TellClock):
                now = time.monotonic_ns()
                found.append((now - sent, answer.now_ns - (sent + now) // 2))
        if not found:
            raise StartupError(f"{self._where} does not tell its time")
        way, shift = min(found)
        return shift if abs(shift) > way else 0

    def _check(self, answer: ToNode | None) -> None:
        """Raise StartupError if there is no use in waiting."""
        if isinstance(answer, Refused):
            raise StartupError(f"{self._where} refused this node: {answer.why}")
        if isinstance(answer, Bye):
            raise StartupError(f"{self._where} ended: {answer.why or 'it was stopped'}")

    def _send(self, message: ToNodeZero) -> None:
        self._socket.send(self._encode(message))

    def _receive(self, seconds: float) -> ToNode | None:
        """The next message, None if none came in that time. Raises StartupError for bytes that are none."""
        if not self._socket.poll(int(seconds * 1000)):
            return None
        try:
            return self._decode(self._socket.recv())
        except msgspec.DecodeError as error:
            raise StartupError(f"{self._where} says what this version does not know: {error}") from None

    # ------------------------------------------------------------------ the thread

    def start(self, on_end: Callable[[str | None], None]) -> None:
        """Keep in touch; `on_end(why)` is called once from the thread, with None when node 0 stopped in order."""
        self._thread = threading.Thread(target=self._run, args=(on_end,), name="sgviz-node-0", daemon=True)
        self._thread.start()

    def tell(self, message: ToNodeZero) -> None:
        """Queue a message; safe from any thread."""
        self._out.put(message)

    def _run(self, on_end: Callable[[str | None], None]) -> None:
        try:
            self._keep_in_touch(on_end)
            self._send_queued()
            self._send(self._closing or Leaving(why="it lost node 0"))
        finally:
            self._socket.close(linger=LAST_WORDS_MS)

    def _keep_in_touch(self, on_end: Callable[[str | None], None]) -> None:
        pause = self._limit / BEATS
        lived, beat_at, heard = Lived(), 0.0, 0.0
        while self._closing is None:
            answer = self._listen(min(POLL_MS / 1000, pause / 2))
            now = lived.now()
            if isinstance(answer, Bye):
                self._closing = Leaving(why="node 0 ended")
                on_end(f"{self._where} ended: {answer.why}" if answer.why else None)
                return
            if isinstance(answer, Refused):
                self._closing = Leaving(why="node 0 refused it")
                on_end(f"{self._where} refused this node: {answer.why}")
                return
            heard = now if answer is not None else heard
            if now - heard > self._limit:
                on_end(f"{self._where} gave no sign of life for {self._limit:g} s")
                return
            if now >= beat_at:
                beat_at = now + pause
                self._send(Beat())
            self._send_queued()

    def _listen(self, seconds: float) -> ToNode | None:
        try:
            return self._receive(seconds)
        except StartupError as error:
            log.warning("%s", error.message)
            return None

    def _send_queued(self) -> None:
        while True:
            try:
                self._send(self._out.get_nowait())
            except Empty:
                return

    def close(self, why: str) -> None:
        """Say that this node leaves, and why; harmless if node 0 has gone."""
        self._closing = self._closing or Leaving(why=why)
        if self._thread is None:
            self._send(self._closing)
            self._socket.close(linger=LAST_WORDS_MS)
        else:
            self._thread.join()
