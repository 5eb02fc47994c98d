"""Wires: the sockets of a virtual run. A message is encoded, takes its time, and is decoded when it is taken.

They stand in for `sgviz.channel`, so that every component works as it does between processes: what arrives is a
copy, and encoding and decoding are paid by whom they are paid by there. Imports: channel, virtual.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any, Generic, TypeVar

import msgspec

from sgviz.channel import AsyncReceiver, Receiver, Sender
from sgviz.virtual.host import ActorClock, Host

T = TypeVar("T")


class Wire(Generic[T]):
    """Messages on their way to one component, in the order of their arrival.

    Args:
        type: the union of what may be sent.
    """

    def __init__(self, type: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(type).decode
        self._heap: list[tuple[int, int, bytes]] = []
        self._numbers = itertools.count()

    def put(self, at: int, data: bytes) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), data))

    @property
    def first_at(self) -> int | None:
        """When the next message arrives."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> T:
        """The next message, whether it has arrived or not."""
        message: T = self._decode(heapq.heappop(self._heap)[2])
        return message

    def take_until(self, now: int, limit: int) -> list[T]:
        """All that have arrived by `now`, at most `limit`."""
        out: list[T] = []
        while self._heap and self._heap[0][0] <= now and len(out) < limit:
            out.append(self.take())
        return out


class WireSender(Sender):
    """The sending end of a wire: a message leaves at its sender's time and arrives a hop later."""

    def __init__(self, wire: Wire[Any], clock: ActorClock, host: Host) -> None:
        self._wire = wire
        self._clock = clock
        self._hop_ns, self._send_ns = host.hop_ns, host.send_ns
        self._encode = msgspec.msgpack.Encoder().encode
        self.sent = 0

    def send(self, message: msgspec.Struct) -> None:
        data = self._encode(message)
        self._clock.spend(self._send_ns)
        self._wire.put(self._clock.now() + self._hop_ns, data)
        self.sent += 1

    def close(self, linger_ms: int = 0) -> None:
        """Nothing is open."""


class HandedIn(AsyncReceiver[T]):
    """The receiving end for an asyncio loop that is stepped by hand: `hand_in` is what makes `recv` return."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T] = asyncio.Queue()

    def hand_in(self, message: T) -> None:
        self._queue.put_nowait(message)

    async def recv(self) -> T:
        return await self._queue.get()

    def close(self) -> None:
        """Nothing is open."""


class Unread(Receiver[T]):
    """The receiver of a component whose messages are handed to it one by one."""

    def __init__(self) -> None:
        pass

    def drain(self, limit: int = 1024) -> list[T]:
        return []

    def wait(self, timeout_ms: int) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""
