"""Sender: the prefill side of one request, and the pieces that it is sent in. Imports: disaggregation, events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from sgviz.cache.req_kv import Slots
from sgviz.disaggregation.protocol import KVAux, KVPoll, TransferStats
from sgviz.disaggregation.staging import Buffer
from sgviz.disaggregation.wire import Destination, Piece


@dataclass(slots=True, kw_only=True)
class OutPiece:
    """A piece from the queue on until it is confirmed."""

    number: int
    start: int
    slots: Slots
    cached: bool
    aux: KVAux | None
    buffer: Buffer | None = None

    def message(self, room: int, key: str, size: int, checksum: int) -> Piece:
        """What the decode side is told of it; `size`: of its bytes, which are in the buffer."""
        assert self.buffer is not None
        return Piece(
            room=room,
            key=key,
            number=self.number,
            start=self.start,
            tokens=len(self.slots),
            size=size,
            segment=self.buffer.segment,
            offset=self.buffer.offset,
            checksum=checksum,
            last=self.aux is not None,
            aux=self.aux,
        )


class SenderHost(Protocol):
    """What a sender needs of its manager."""

    piece_tokens: int

    def now(self) -> int: ...

    def feed(self) -> None: ...

    def end(self, sender: Sender, why: str, *, tell: bool, status: int = 500) -> None: ...


class Sender:
    """Satisfies `protocol.KVSender`.

    Attributes:
        peer: identity of the decode rank it is bound to. key: what that one calls the room.
        queued: pieces not read yet. reading: how many are being read. open_pieces: how many are not confirmed.
        moved_ns: when a piece was queued or confirmed last.
    """

    def __init__(self, host: SenderHost, rid: str, room: int, created_ns: int) -> None:
        self.rid = rid
        self.room = room
        self.created_ns = created_ns
        self.decode_prefix_len = 0
        self.failure = ""
        self.failure_status = 500
        self.stats = TransferStats()
        self.peer: bytes | None = None
        self.key = ""
        self.destined = False
        self.state = KVPoll.BOOTSTRAPPING
        self.queued: deque[OutPiece] = deque()
        self.reading = 0
        self.open_pieces = 0
        self.moved_ns = 0
        self.last_queued = False
        self._pieces = 0
        self._host = host

    @property
    def open(self) -> bool:
        return self.state not in (KVPoll.FAILED, KVPoll.SUCCESS)

    @property
    def busy(self) -> bool:
        """Pages are read, or are still to be."""
        return self.reading > 0 or bool(self.queued)

    def poll(self) -> KVPoll:
        return self.state

    def bind(self, message: Destination, backend: str) -> None:
        """The decode side has told where it goes."""
        self.destined = True
        self.decode_prefix_len = message.prefix_len
        self.stats = replace(self.stats, backend=backend)
        self.state = KVPoll.WAITING_FOR_INPUT

    def send(self, start: int, slots: Slots, *, aux: KVAux | None = None, cached: bool = False) -> None:
        """Queue the tokens in pieces and read what there are buffers for; nothing if the transfer has ended."""
        if not self.open or self.last_queued:
            return
        most = self._host.piece_tokens
        parts = [slots[at : at + most] for at in range(0, len(slots), most)]
        if not parts and aux is not None:
            parts = [slots]
        for part in parts:
            self._pieces += 1
            piece = OutPiece(number=self._pieces - 1, start=start, slots=part, cached=cached, aux=None)
            self.queued.append(piece)
            start += len(part)
        self.open_pieces += len(parts)
        self.moved_ns = self._host.now()
        if aux is not None:
            self.queued[-1].aux, self.last_queued = aux, True
        if self.state is KVPoll.WAITING_FOR_INPUT:
            self.state = KVPoll.TRANSFERRING
        if not self.stats.start_ns:
            self.stats = replace(self.stats, start_ns=self._host.now())
        self._host.feed()

    def sent(self, size: int) -> None:
        self.stats = replace(self.stats, bytes=self.stats.bytes + size, pieces=self.stats.pieces + 1)

    def confirmed(self, now: int) -> bool:
        """One more piece is in place; says whether it was the last."""
        self.open_pieces -= 1
        self.moved_ns = now
        if self.open_pieces or not self.last_queued:
            return False
        self.state = KVPoll.SUCCESS
        self.stats = replace(self.stats, end_ns=now)
        return True

    def abort(self, why: str, status: int = 500) -> None:
        if self.open:
            self._host.end(self, why, tell=True, status=status)

    def fail(self, why: str, now: int, status: int) -> None:
        self.state, self.failure, self.failure_status = KVPoll.FAILED, why, status
        self.queued.clear()
        self.stats = replace(self.stats, end_ns=now)
