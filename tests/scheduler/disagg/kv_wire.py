"""A pair of KV managers in memory: copies between two workers' pools, step by step and as slowly as a test wants.

A piece takes `delay` pumps of the decode side to be read and written; until then its sender or receiver is busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.cache.req_kv import Slots
from sgviz.disaggregation.protocol import KVAux, KVPoll, TransferStats, Wake
from sgviz.errors import BadRequest
from sgviz.worker.protocol import MovesKV


@dataclass
class Piece:
    start: int
    slots: Slots
    aux: KVAux | None
    cached: bool
    due: int


@dataclass
class Room:
    """What both sides know of one request."""

    number: int
    sender: Sender | None = None
    receiver: Receiver | None = None
    prefix: int | None = None
    slots: Slots | None = None
    pieces: list[Piece] = field(default_factory=list)
    failure: str = ""
    status: int = 500
    failed_for: set[str] = field(default_factory=set)
    aux: KVAux | None = None


class End:
    """What senders and receivers share."""

    def __init__(self, wire: Wire, room: Room) -> None:
        self._wire, self._room = wire, room
        self.room = room.number
        self.stats = TransferStats(backend="fake")

    @property
    def failure(self) -> str:
        return self._room.failure

    @property
    def busy(self) -> bool:
        return bool(self._room.pieces)

    @property
    def failure_status(self) -> int:
        return self._room.status

    def abort(self, why: str, status: int = 500) -> None:
        if self._room.aux is None and not self._room.failure:
            self._room.failure, self._room.status = why, status
            self._wire.news = 4


class Sender(End):
    decode_prefix_len = 0

    def poll(self) -> KVPoll:
        if self._room.failure:
            return KVPoll.FAILED
        if self._room.aux is not None:
            return KVPoll.SUCCESS
        if self._room.slots is None:
            return KVPoll.BOOTSTRAPPING
        self.decode_prefix_len = self._room.prefix or 0
        return KVPoll.TRANSFERRING if self._room.pieces else KVPoll.WAITING_FOR_INPUT

    def send(self, start: int, slots: Slots, *, aux: KVAux | None = None, cached: bool = False) -> None:
        assert len(slots)
        due = self._wire.now + self._wire.delay
        piece = Piece(start, slots, aux, cached, due)
        self._room.pieces.append(piece)
        self._wire.sent.append((self.room, piece))


class Receiver(End):
    prefill_dp_rank = 0

    @property
    def aux(self) -> KVAux | None:
        return self._room.aux

    def poll(self) -> KVPoll:
        if self._room.failure:
            return KVPoll.FAILED
        if self._room.aux is not None:
            return KVPoll.SUCCESS
        if self._room.slots is not None:
            return KVPoll.TRANSFERRING
        return KVPoll.WAITING_FOR_INPUT if self._room.sender is not None else KVPoll.BOOTSTRAPPING

    def init(self, slots: Slots, prefix_len: int) -> None:
        assert len(slots)
        self._room.slots, self._room.prefix = slots, prefix_len


class Wire:
    """Both managers: `pump` of either moves what is due.

    `sent`: every piece with its room. `spoil`: makes another aux of the one that travels.
    """

    def __init__(self, prefill: MovesKV, decode: MovesKV, delay: int = 0) -> None:
        self.delay = delay
        self.now = 0
        self.rooms: dict[int, Room] = {}
        self.sent: list[tuple[int, Piece]] = []
        self.wrong_room = 0
        self.closed = 0
        self.news = 0  # pumps in which both sides see a failure
        self._workers = prefill, decode
        self._taken: set[tuple[str, int]] = set()

    @property
    def busy(self) -> bool:
        return self.news > 0 or any(not room.failure and room.aux is None for room in self.rooms.values())

    def create_sender(self, rid: str, room: int, num_tokens: int, *, host: str = "") -> Sender:
        place = self._open("sender", room)
        place.sender = Sender(self, place)
        return place.sender

    def create_receiver(
        self, rid: str, room: int, host: str, port: int, num_tokens: int, prefill_dp_rank: int | None = None
    ) -> Receiver:
        place = self._open("receiver", room)
        place.receiver = Receiver(self, place)
        return place.receiver

    def fail(self, room: int, why: str) -> None:
        """As if the transfer had broken."""
        self.rooms[room].failure = why
        self.news = 4

    def pump(self) -> None:
        self.now += 1
        self.news -= 1
        for room in self.rooms.values():
            while room.pieces and room.pieces[0].due <= self.now:
                self._copy(room, room.pieces.pop(0))

    wait_ms = 1

    def wakes(self) -> list[Wake]:
        return []

    def close(self) -> None:
        self.closed += 1

    def _open(self, side: str, room: int) -> Room:
        if (side, room) in self._taken:
            raise BadRequest(f"room {room} is another request's", param="bootstrap_room")
        self._taken.add((side, room))
        return self.rooms.setdefault(room, Room(room))

    def _copy(self, room: Room, piece: Piece) -> None:
        """Even of a room that has failed: the pages are held until then, so nobody else may see it."""
        assert room.slots is not None and room.prefix is not None
        prefill, decode = self._workers
        data = bytearray(len(piece.slots) * prefill.kv_layout.wire_bytes)
        at = piece.start - room.prefix
        assert at >= 0 and at + len(piece.slots) <= len(room.slots)
        prefill.read_kv(piece.slots, memoryview(data)).result()
        decode.write_kv(room.slots[at : at + len(piece.slots)], memoryview(data)).result()
        if piece.aux is not None and not room.failure:
            assert at + len(piece.slots) == len(room.slots), "the last piece ends the prompt"
            room.aux = piece.aux
            if self.wrong_room:
                room.aux = KVAux(room=self.wrong_room, first_token=piece.aux.first_token)
