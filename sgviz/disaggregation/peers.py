"""Peers: the decode ranks that a prefill rank has met: one socket for all, and who of them is silent.

A rank that is lost is not listened to any more: the answer to its next sign of life tells it so, and it comes back
under another name. Its old one is forgotten when it gave no sign for so long that nothing can wait under it
(`Limits.memory`). The counterpart of `links`. Imports: channel, disaggregation, errors, events (clock).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from sgviz.channel import turn_strangers_away
from sgviz.disaggregation.heart import HeartThread, PrefillHeart, bracketed
from sgviz.disaggregation.limits import Limits
from sgviz.disaggregation.staging import Buffer, Staging
from sgviz.disaggregation.wire import Carrier, Failed, ToDecode, ToPrefill
from sgviz.errors import SgvizError, StartupError
from sgviz.events.clock import Clock

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Peer:
    """A decode rank.

    `sent`: buffers that it has, by key and piece. `ended`: by key, what it was told of a failed transfer, and when.
    """

    carrier: Carrier
    since_ns: int
    staging: Staging | None = None
    sent: dict[tuple[str, int], Buffer] = field(default_factory=dict)
    ended: dict[str, tuple[Failed, int]] = field(default_factory=dict)

    def take(self, size: int, *, or_tcp: bool) -> Buffer | None:
        """A free buffer of `size` bytes (the same in every call); None: all are under way.

        Where shared memory is full its KV goes over tcp from then on, if it may. Raises SgvizError if it may not.
        """
        if self.staging is None:
            try:
                self.staging = Staging(self.carrier, size)
            except SgvizError as error:
                if not or_tcp:
                    raise
                log.warning("KV goes over TCP to a decode server of this host: %s", error.message)
                self.carrier = "tcp"
                self.staging = Staging(self.carrier, size)
        return self.staging.take()

    def reclaim(self, key: str) -> None:
        """Nothing that was sent under `key` is read any more, not even what has not come yet."""
        for name in [each for each in self.sent if each[0] == key]:
            buffer = self.sent.pop(name)
            self.give_back(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """It is not read any more."""
        if self.staging is not None:
            self.staging.give_back(buffer)

    def mapped(self, segment: str) -> None:
        """It has mapped the segment."""
        if self.staging is not None:
            self.staging.mapped(segment)

    def unanswered(self, now: int, limit_ns: int) -> list[Failed]:
        """Ends that were told `limit_ns` ago and have buffers still: they, or their answers, may be lost."""
        kept = {key for key, _ in self.sent}
        self.ended = {key: told for key, told in self.ended.items() if key in kept}
        late = [(key, failed) for key, (failed, since) in self.ended.items() if now - since > limit_ns]
        for key, failed in late:
            self.ended[key] = failed, now
        return [failed for _, failed in late]

    def close(self) -> None:
        """Its buffers are never used again."""
        if self.staging is not None:
            self.staging.close()


class Peers:
    """Those that are not lost, by the names of their connections.

    Args:
        host: where they are listened to. threaded: signs of life are answered by a thread; False: by `beat`.

    Attributes:
        socket: readable when a message has come. ports: of messages, and of signs of life.
        heart: when each was heard.

    Raises:
        StartupError: nobody can listen there.
    """

    def __init__(
        self, context: zmq.Context[Any], host: str, clock: Clock, limits: Limits, *, threaded: bool
    ) -> None:
        self._limits = limits
        self._met: dict[bytes, Peer] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToPrefill).decode
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.set_hwm(0)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)  # who connects anew, though the old end looks alive
        self.socket.set(zmq.IPV6, ":" in host)
        turn_strangers_away(self.socket)
        try:
            port = self.socket.bind_to_random_port(f"tcp://{bracketed(host)}")
            self.heart = PrefillHeart(context, host, clock)
        except zmq.ZMQError as error:
            self.socket.close()
            raise StartupError(f"the KV channel cannot be opened at {host}: {error}") from error
        self.ports = (port, self.heart.port)
        self._thread = HeartThread(self.heart.beat, limits.interval / 1e9) if threaded else None

    def __getitem__(self, identity: bytes) -> Peer:
        return self._met[identity]

    def get(self, identity: bytes) -> Peer | None:
        return self._met.get(identity)

    def meet(self, identity: bytes, carrier: Carrier, now: int) -> None:
        """It names a room; how its KV goes counts from the first one on."""
        self._met.setdefault(identity, Peer(carrier, now))

    @property
    def hold_buffers(self) -> bool:
        """Whether there are buffers that they have not given back."""
        return any(peer.sent for peer in self._met.values())

    def beat(self) -> None:
        if self._thread is None:
            self.heart.beat()

    def receive(self) -> Iterator[tuple[bytes, ToPrefill]]:
        """What has come, and from whom."""
        while True:
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(frames[0])
            except (msgspec.DecodeError, IndexError):
                continue  # not of our kind: nobody to answer to
            if not self.heart.is_lost(identity):
                yield identity, message

    def send(self, identity: bytes, message: ToDecode, data: memoryview | None = None) -> None:
        """`data`: the bytes of a piece; they are not copied, and must not change until it is confirmed."""
        frames = [identity, self._encode(message)] + ([data] if data is not None else [])
        self.socket.send_multipart(frames, zmq.NOBLOCK, copy=data is None)

    def tell_end(self, identity: bytes, failed: Failed, now: int) -> None:
        """The transfer failed; said again until its buffers are back."""
        self._met[identity].ended[failed.key] = failed, now
        self.send(identity, failed)

    def tell_again(self, now: int) -> None:
        """What has not been answered, as after a cut."""
        for identity, peer in self._met.items():
            for failed in peer.unanswered(now, self._limits.interval):
                self.send(identity, failed)

    def silent(self, now: int) -> list[tuple[bytes, int]]:
        """Who was not heard for too long, and for how many ns; they are lost.

        Their buffers are never used again: a rank that lives all the same may still read them.
        """
        gone: list[tuple[bytes, int]] = []
        for identity, peer in list(self._met.items()):
            silent = now - max(peer.since_ns, self.heart.heard(identity))
            if silent > self._limits.silence:
                del self._met[identity]
                peer.close()
                self.heart.lose(identity)
                gone.append((identity, silent))
        self.heart.forget(now - self._limits.memory)
        return gone

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self.heart.close()
        self.socket.close(linger=500)
        for peer in self._met.values():
            peer.close()
        self._met.clear()
