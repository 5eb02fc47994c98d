"""Signs of life between the two sides, on sockets of their own.

A decode side pings each prefill rank that it knows, the rank answers. A thread does both, so that a scheduler that
waits for a long forward is not taken for a dead one; without the thread `beat` is called by whoever drives.
Who misses two (heartbeat_max_failures), and half an interval more, is lost: 12.5 s by default.
Mirrors the heartbeat thread of SGLang's decode side. Imports: channel, errors, events (clock).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from sgviz.channel import turn_strangers_away
from sgviz.errors import SgvizError
from sgviz.events.clock import Clock

BEATS_PER_INTERVAL = 10
LONGEST_PAUSE_S = 0.5
PING, PONG, LOST = b"ping", b"pong", b"lost"


class HeartThread:
    """Calls `beat` several times an interval until it is closed."""

    def __init__(self, beat: Callable[[], None], interval_s: float) -> None:
        self._beat = beat
        self._pause = min(interval_s / BEATS_PER_INTERVAL, LONGEST_PAUSE_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgviz-kv-heart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            self._beat()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class PrefillHeart:
    """Answers the pings, and knows when each decode rank was heard and which of them are lost.

    Each connection of a decode rank has a name of its own, so what is known of one that is silent may be forgotten.
    """

    def __init__(self, context: zmq.Context[Any], host: str, clock: Clock) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.IPV6, ":" in host)
        turn_strangers_away(self._socket)
        self.port = self._socket.bind_to_random_port(f"tcp://{bracketed(host)}")
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[bytes, int] = {}
        self._lost: dict[bytes, int] = {}  # when each gave its last sign, or was lost

    def heard(self, identity: bytes) -> int:
        """When, in ns of the clock; 0: never."""
        with self._lock:
            return self._heard.get(identity, 0)

    def lose(self, identity: bytes) -> None:
        """It was silent for too long: should it ping again, it learns so."""
        with self._lock:
            self._heard.pop(identity, None)
            self._lost[identity] = self._clock.now()

    def is_lost(self, identity: bytes) -> bool:
        with self._lock:
            return identity in self._lost

    def forget(self, before_ns: int) -> None:
        """Forget whom nothing was heard of since `before_ns`, and who was lost before it."""
        with self._lock:
            for times in (self._heard, self._lost):
                for identity in [each for each, at in times.items() if at < before_ns]:
                    del times[identity]

    def beat(self) -> None:
        with self._lock:
            while True:
                try:
                    identity, _ = self._socket.recv_multipart(zmq.NOBLOCK)
                    if identity in self._lost:
                        self._lost[identity] = self._clock.now()
                        self._socket.send_multipart([identity, LOST], zmq.NOBLOCK)
                    else:
                        self._heard[identity] = self._clock.now()
                        self._socket.send_multipart([identity, PONG], zmq.NOBLOCK)
                except (zmq.Again, ValueError):
                    return

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class DecodeHeart:
    """Pings prefill ranks, and knows when each was heard."""

    def __init__(self, context: zmq.Context[Any], clock: Clock, interval_ns: int) -> None:
        self._context = context
        self._clock = clock
        self._interval = interval_ns
        self._lock = threading.Lock()
        self._sockets: dict[bytes, zmq.Socket[bytes]] = {}
        self._heard: dict[bytes, int] = {}
        self._due: dict[bytes, int] = {}

    def add(self, identity: bytes, address: str) -> None:
        """Ping that rank from now on. Raises SgvizError if `address` is none."""
        socket = connected(
            self._context, identity, address, hwm=16
        )  # of pings to a dead host, a few are enough
        with self._lock:
            self._sockets[identity] = socket
            self._heard[identity] = self._due[identity] = self._clock.now()

    def heard(self, identity: bytes) -> int:
        """When it answered last, in ns of the clock; 0: it counts this side as lost."""
        with self._lock:
            return self._heard[identity]

    def remove(self, identity: bytes) -> None:
        with self._lock:
            self._sockets.pop(identity).close()
            del self._heard[identity], self._due[identity]

    def beat(self) -> None:
        with self._lock:
            now = self._clock.now()
            for identity, socket in self._sockets.items():
                self._take(identity, socket, now)
                if now >= self._due[identity]:
                    self._due[identity] = now + self._interval
                    with suppress(zmq.Again):
                        socket.send(PING, zmq.NOBLOCK)

    def _take(self, identity: bytes, socket: zmq.Socket[bytes], now: int) -> None:
        while True:
            try:
                answer = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard[identity] = 0 if answer == LOST else now

    def close(self) -> None:
        with self._lock:
            for socket in self._sockets.values():
                socket.close()
            self._sockets.clear()


def connected(context: zmq.Context[Any], identity: bytes, address: str, *, hwm: int) -> zmq.Socket[bytes]:
    """A DEALER socket to `address`, which another host has given. Raises SgvizError if it is none."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.set_hwm(hwm)
    socket.set(zmq.IPV6, "[" in address)
    socket.set(zmq.IDENTITY, identity)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise SgvizError(f"{address!r:.100} is no address of a prefill server: {error.strerror}") from error
    return socket


def bracketed(host: str) -> str:
    """As it stands in an address."""
    return f"[{host}]" if ":" in host else host
