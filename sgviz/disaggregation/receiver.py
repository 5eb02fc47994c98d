"""Receiver: the decode side of one request. Imports: disaggregation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sgviz.cache.req_kv import Slots, no_slots
from sgviz.disaggregation.protocol import KVAux, KVPoll, TransferStats
from sgviz.disaggregation.wire import Abort, Piece
from sgviz.errors import SgvizError


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for. `rank`: of the prefill server, None: to be found out."""

    rid: str
    room: int
    host: str
    port: int
    rank: int | None


class ReceiverHost(Protocol):
    """What a receiver needs of its manager."""

    def now(self) -> int: ...

    def announce(self, receiver: Receiver) -> None: ...

    def end(self, receiver: Receiver, why: str, *, tell: bool, status: int = 500) -> None: ...


class Receiver:
    """Satisfies `protocol.KVReceiver`.

    Attributes:
        key: how both sides name the room. link: identity of the connection to the prefill rank.
        writing: pieces that are being written.
        untold: it ended before the prefill rank was found, which is to be told once it is.
    """

    def __init__(self, host: ReceiverHost, asked: Asked, key: str, created_ns: int) -> None:
        self.asked = asked
        self.rid, self.room = asked.rid, asked.room
        self.key = key
        self.created_ns = created_ns
        self.aux: KVAux | None = None
        self.prefill_dp_rank = asked.rank or 0
        self.failure = ""
        self.failure_status = 500
        self.untold = False
        self.stats = TransferStats()
        self.state = KVPoll.BOOTSTRAPPING
        self.link: bytes | None = None
        self.slots = no_slots()
        self.prefix_len = 0
        self.init_ns = 0
        self.writing = 0
        self._next = 0
        self._came = 0
        self._last: KVAux | None = None
        self._host = host

    @property
    def open(self) -> bool:
        return self.state not in (KVPoll.FAILED, KVPoll.SUCCESS)

    @property
    def busy(self) -> bool:
        return self.writing > 0

    def poll(self) -> KVPoll:
        return self.state

    def init(self, slots: Slots, prefix_len: int) -> None:
        """Where the tokens go. Raises SgvizError before the other side is known; nothing if it has failed."""
        if self.state is KVPoll.BOOTSTRAPPING:
            raise SgvizError(f"room {self.room}: the prefill side is not known yet")
        if self.state is not KVPoll.WAITING_FOR_INPUT or self.init_ns:
            return
        self.slots, self.prefix_len = slots.copy(), prefix_len
        self.init_ns = self._host.now()
        self._host.announce(self)

    def abort(self, why: str, status: int = 500) -> None:
        if self.open:
            self._host.end(self, why, tell=True, status=status)

    def goodbye(self) -> Abort:
        """What the prefill side is told of its end."""
        self.untold = False
        return Abort(room=self.room, key=self.key, why=self.failure, status=self.failure_status)

    def found(self, link: bytes, rank: int, backend: str) -> None:
        """The prefill rank is known."""
        self.link, self.prefill_dp_rank = link, rank
        self.stats = replace(self.stats, backend=backend)
        self.state = KVPoll.WAITING_FOR_INPUT

    def take(self, piece: Piece) -> Slots:
        """Where the piece goes. Raises SgvizError if it is none that can come now."""
        first, end = piece.start - self.prefix_len, piece.start - self.prefix_len + piece.tokens
        if not self.init_ns or first < 0 or end > len(self.slots):
            raise SgvizError(
                f"a piece has tokens {piece.start} to {piece.start + piece.tokens}; asked for were "
                f"{len(self.slots)} from {self.prefix_len} on"
            )
        if piece.number != self._next or first != self._came:
            raise SgvizError(f"piece {piece.number} came where {self._next} was due: one is lost")
        self._next, self._came = self._next + 1, end
        self.state = KVPoll.TRANSFERRING
        if piece.last:
            self._end_of(piece)
        backend = (
            "tcp" if piece.size and not piece.segment else self.stats.backend
        )  # its shared memory may be full
        self.stats = replace(self.stats, start_ns=self.stats.start_ns or self._host.now(), backend=backend)
        return self.slots[first:end]

    def seen(self, piece: Piece) -> bool:
        """It came before."""
        return piece.number < self._next

    def _end_of(self, piece: Piece) -> None:
        if piece.aux is None or piece.aux.room != self.room:
            raise SgvizError(f"what came with the last piece is of room {piece.aux and piece.aux.room}")
        if self._came != len(self.slots):
            raise SgvizError(f"the transfer ended after {self._came} of {len(self.slots)} tokens")
        self._last = piece.aux

    def written(self, size: int) -> bool:
        """A piece is in its pages; says whether all are."""
        self.stats = replace(self.stats, bytes=self.stats.bytes + size, pieces=self.stats.pieces + 1)
        if self._last is None or self.writing:
            return False
        self.aux, self.state = self._last, KVPoll.SUCCESS
        self.stats = replace(self.stats, end_ns=self._host.now())
        return True

    def fail(self, why: str, status: int) -> None:
        self.state, self.failure, self.failure_status = KVPoll.FAILED, why, status
        self.stats = replace(self.stats, end_ns=self._host.now())
