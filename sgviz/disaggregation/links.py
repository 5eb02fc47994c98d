"""Links: the connections of a decode rank to the prefill ranks that it has met, and which of them are silent.

A DEALER socket each, and signs of life on another. A rank that was lost and comes back is met anew, under another
identity. Mirrors the connection pool of SGLang's CommonKVReceiver. Imports: disaggregation, errors, events (clock).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from sgviz.disaggregation import shared_memory
from sgviz.disaggregation.heart import DecodeHeart, HeartThread, bracketed, connected
from sgviz.disaggregation.receiver import Asked
from sgviz.disaggregation.wire import Carrier, RankRoute
from sgviz.errors import SgvizError
from sgviz.events.clock import Clock

WILDCARDS = ("0.0.0.0", "::")


@dataclass(slots=True, kw_only=True)
class Link:
    """A connection to a prefill rank. `segments`: its shared memory, as mapped here."""

    identity: bytes
    address: str
    carrier: Carrier
    socket: zmq.Socket[bytes]
    segments: dict[str, memoryview] = field(default_factory=dict)


class Links:
    """Those that are open.

    Args:
        backend: the setting disaggregation_transfer_backend. interval_ns: between two signs of life.
        threaded: a thread sends them; False: `beat` does.
    """

    def __init__(
        self, backend: str, context: zmq.Context[Any], clock: Clock, interval_ns: int, *, threaded: bool
    ) -> None:
        self._backend, self._context = backend, context
        self._open: dict[str, Link] = {}
        self.heart = DecodeHeart(context, clock, interval_ns)
        self._thread = HeartThread(self.heart.beat, interval_ns / 1e9) if threaded else None

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._open.values()))

    def of(self, identity: bytes | None) -> Link | None:
        return next((each for each in self._open.values() if each.identity == identity), None)

    def beat(self) -> None:
        if self._thread is None:
            self.heart.beat()

    def to(self, asked: Asked, route: RankRoute, tag: str) -> Link:
        """The link to that rank, opened if there is none yet.

        Args:
            tag: kind of the KV that is taken here.

        Raises:
            SgvizError: KV of that rank cannot be taken here, or its address is none.
        """
        if route.tag != tag:
            raise SgvizError(
                f"the prefill server {asked.host}:{asked.port} has KV of {route.tag}, this server of {tag}; both must "
                "serve the same model with the same dtype"
            )
        host = bracketed(asked.host if route.rank_ip in WILDCARDS else route.rank_ip)
        address = f"tcp://{host}:{route.rank_port}"
        name = f"{address} {route.token}"
        if name not in self._open:
            link = self._connect(address, self._carrier(route))
            try:
                self.heart.add(link.identity, f"tcp://{host}:{route.heart_port}")
            except SgvizError:
                link.socket.close()
                raise
            self._open[name] = link
        return self._open[name]

    def silent(self, now: int, limit_ns: int) -> list[tuple[Link, str]]:
        """Who was not heard for so long, and how that shows; they are closed."""
        gone: list[tuple[Link, str]] = []
        for name, link in list(self._open.items()):
            heard = self.heart.heard(link.identity)
            if now - heard > limit_ns:
                del self._open[name]
                self.heart.remove(link.identity)
                link.socket.close()
                why = f"was silent for {(now - heard) / 1e9:.1f} s" if heard else "counts this side as lost"
                gone.append((link, why))
        return gone

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self.heart.close()
        for link in self._open.values():
            link.socket.close(linger=500)
        self._open.clear()

    def _connect(self, address: str, carrier: Carrier) -> Link:
        identity = b"k" + uuid.uuid4().bytes
        socket = connected(self._context, identity, address, hwm=0)
        return Link(identity=identity, address=address, carrier=carrier, socket=socket)

    def _carrier(self, route: RankRoute) -> Carrier:
        """How the KV comes: through memory that both see, if both settings let it. Raises SgvizError if in no way."""
        wanted = self._backend
        shared = wanted in ("auto", "shm") and "shm" in route.carriers
        if shared and shared_memory.same_memory(route.boot_id, route.token_name, route.token):
            return "shm"
        if wanted in ("auto", "tcp") and "tcp" in route.carriers:
            return "tcp"
        raise SgvizError(
            f"KV cannot travel: this server takes it by {wanted}, the prefill server gives it by "
            f"{' or '.join(route.carriers)}, and shm needs one host and one /dev/shm"
        )
