"""DecodeManager: finds prefill ranks, tells them where KV goes, and writes what comes into the pages that wait for it.

Whether a piece still has an owner is decided here, before it is written; what has none is only confirmed, so that its
buffer is used again. A room ends when its prefill rank was silent for 12.5 s (heartbeats), was not found in 300 s
(bootstrap_timeout), or has not sent all 300 s after it was told where to (waiting_timeout). Whatever ends here is told
there, even if the rank is only found later; that message also means that nothing of the room is read any more.
Mirrors SGLang's MooncakeKVManager on the decode side.
Imports: config, disaggregation, errors, events, worker protocol.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from sgviz.config import Settings
from sgviz.disaggregation import shared_memory
from sgviz.disaggregation.checksum import verify
from sgviz.disaggregation.copies import Copies, Times
from sgviz.disaggregation.fake import FakeTransfer
from sgviz.disaggregation.links import Link, Links
from sgviz.disaggregation.lookups import Lookups
from sgviz.disaggregation.protocol import LOST, KVPoll, KVReceiver, Wake
from sgviz.disaggregation.receiver import Asked, Receiver
from sgviz.disaggregation.side import Side
from sgviz.disaggregation.wire import (
    NOT_TAKEN,
    Abort,
    Destination,
    Failed,
    Hello,
    Mapped,
    Piece,
    PieceDone,
    ToDecode,
    ToPrefill,
)
from sgviz.errors import SgvizError
from sgviz.events import Tracer, schema
from sgviz.events.clock import Clock
from sgviz.worker.protocol import MovesKV


@dataclass(slots=True, kw_only=True)
class _Writing:
    """A piece on its way into the pool. `memory` is held until it is there."""

    link: Link
    receiver: Receiver
    piece: Piece
    memory: memoryview


class DecodeManager(Side[Receiver]):
    """Satisfies `protocol.DecodeKVManager`; see `factory.make_kv_manager` for the arguments.

    Args:
        threaded: signs of life are sent by a thread; False: by `pump`.
    """

    def __init__(
        self,
        settings: Settings,
        worker: MovesKV,
        context: zmq.Context[Any],
        clock: Clock,
        trace: Tracer,
        *,
        threaded: bool = True,
    ) -> None:
        super().__init__(settings, worker, clock, trace)
        self._untold: list[Receiver] = []
        self._writing: Copies[_Writing] = Copies(clock, self._bell.ring)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToDecode).decode
        self._lookups = Lookups(self._jobs, clock, self._bell.ring)
        backend, interval = self._own.disaggregation_transfer_backend, self._limits.interval
        self._links = Links(backend, context, clock, interval, threaded=threaded)
        self._opened.callback(self._links.close)

    def create_receiver(
        self, rid: str, room: int, host: str, port: int, num_tokens: int, prefill_dp_rank: int | None = None
    ) -> KVReceiver:
        """Raises BadRequest if the room is taken by another request."""
        if self._is_fake(host):
            return FakeTransfer(room)
        self._check_free(room)
        asked = Asked(rid=rid, room=room, host=host, port=port, rank=prefill_dp_rank)
        receiver = self._rooms[room] = Receiver(self, asked, uuid.uuid4().hex, self.now())
        self._lookups.begin(receiver)
        return receiver

    @property
    def busy(self) -> bool:
        return bool(self._rooms or self._writing or self._untold)

    def wakes(self) -> list[Wake]:
        return [self._bell.fd, *(link.socket for link in self._links)]

    def pump(self) -> None:
        self._bell.silence()
        self._links.beat()
        self._meet()
        for link in self._links:
            self._drain(link)
        self._finish()
        self._look_at_times()

    def close(self) -> None:
        """End all rooms, tell their prefill sides, and let what is being written end."""
        for receiver in list(self._rooms.values()):
            self.end(receiver, "the decode server is shutting down", tell=True, status=LOST)
        self._finish(wait=True)
        self._opened.close()

    # ------------------------------------------------------------ for Receiver

    def announce(self, receiver: Receiver) -> None:
        link = self._links.of(receiver.link)
        if link is not None:
            where = Destination(
                room=receiver.room,
                key=receiver.key,
                prefix_len=receiver.prefix_len,
                tokens=len(receiver.slots),
            )
            self._send(link, where)

    def end(self, receiver: Receiver, why: str, *, tell: bool, status: int = 500) -> None:
        """The transfer failed. `tell`: the prefill side is to hear that nothing of it is read any more."""
        receiver.fail(why, status)
        self._leave(receiver)
        receiver.untold = tell
        self._part(receiver)

    def _part(self, receiver: Receiver) -> None:
        """Tell its end as soon as nothing of it is being written and its prefill rank is known."""
        if not receiver.untold or receiver.writing:
            return
        link = self._links.of(receiver.link)
        if link is not None:
            self._send(link, receiver.goodbye())
        elif receiver.link is None:
            self._untold.append(receiver)

    # ------------------------------------------------------------ finding

    def _meet(self) -> None:
        found, failed = self._lookups.look()
        for receiver, why in failed:
            self._unmet(receiver, why, LOST)
        for receiver, route in found:
            try:
                link = self._links.to(receiver.asked, route, self._layout.tag)
            except SgvizError as error:
                self._unmet(receiver, error.message, 500)
                continue
            self._send(link, Hello(room=receiver.room, key=receiver.key, carrier=link.carrier))
            if receiver.open:
                receiver.found(link.identity, route.dp_rank, link.carrier)
            else:
                self._send(link, receiver.goodbye())
        self._untold = [each for each in self._untold if each.untold]

    def _unmet(self, receiver: Receiver, why: str, status: int) -> None:
        """Its prefill rank is never going to be found, or cannot be used."""
        receiver.untold = False
        if receiver.open:
            self.end(receiver, why, tell=False, status=status)

    # ------------------------------------------------------------ what comes

    def _drain(self, link: Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = self._decode(frames[0].buffer)
            except msgspec.DecodeError:
                continue
            if isinstance(message, Piece):
                self._take(link, message, frames[1].buffer if len(frames) > 1 else None)
            else:
                self._failed(link, message)

    def _failed(self, link: Link, message: Failed) -> None:
        receiver = self._owner(link, message)
        if receiver is not None:
            self.end(receiver, message.why, tell=True, status=message.status)
            return
        for writing in self._writing:
            if writing.receiver.key == message.key:
                writing.receiver.untold = True  # told when that is over
                return
        self._send(link, Abort(room=message.room, key=message.key, why=message.why, status=message.status))

    def _owner(self, link: Link, message: Piece | Failed) -> Receiver | None:
        receiver = self._rooms.get(message.room)
        if receiver is None or receiver.key != message.key or receiver.link != link.identity:
            return None
        return receiver

    def _take(self, link: Link, piece: Piece, data: memoryview | None) -> None:
        receiver = self._owner(link, piece)
        if receiver is not None and receiver.seen(piece):
            return  # twice: the first is answered
        if receiver is None:
            self._done(link, piece, written=False)
            return
        try:
            memory = self._memory(link, piece, data)
            verify(piece, memory, wanted=self._own.disaggregation_checksum)
            slots = receiver.take(piece)
        except SgvizError as error:
            self._done(link, piece, written=False)
            self.end(receiver, f"bootstrap_room {piece.room}: {error.message}", tell=True)
            return
        copy = self._worker.write_kv(slots, memory) if len(slots) else None
        receiver.writing += 1
        self._writing.add(_Writing(link=link, receiver=receiver, piece=piece, memory=memory), copy)

    def _memory(self, link: Link, piece: Piece, data: memoryview | None) -> memoryview:
        """The piece's bytes, where they are. Raises SgvizError if they are not all there."""
        if piece.segment:
            if piece.segment not in link.segments:
                link.segments[piece.segment] = shared_memory.attach(piece.segment)
                self._send(link, Mapped(segment=piece.segment))
            data = link.segments[piece.segment][piece.offset : piece.offset + piece.size]
        memory = data if data is not None else memoryview(b"")
        wanted = piece.tokens * self._layout.wire_bytes
        if memory.nbytes != wanted or piece.size != wanted:
            raise SgvizError(f"{piece.tokens} tokens have {wanted} bytes, {memory.nbytes} came")
        return memory

    def _finish(self, *, wait: bool = False) -> None:
        """Confirm what is in its pages. `wait`: until all that came is there."""
        for writing, outcome in self._writing.over(wait=wait):
            receiver = writing.receiver
            receiver.writing -= 1
            if isinstance(outcome, Exception):
                self._done(writing.link, writing.piece, written=False)
                if receiver.open:
                    self.end(receiver, f"its KV could not be written: {outcome}", tell=True)
            else:
                self._written(writing, outcome)
            if not receiver.open:
                self._part(receiver)

    def _written(self, writing: _Writing, times: Times) -> None:
        receiver, piece = writing.receiver, writing.piece
        self._done(writing.link, piece, written=True)
        if not receiver.open:
            return
        size = piece.tokens * self._layout.nominal_bytes
        if self._trace.on:
            self._trace.emit(
                schema.KvReceived(
                    rid=receiver.rid,
                    room=receiver.room,
                    piece=piece.number,
                    start=piece.start,
                    tokens=piece.tokens,
                    bytes=size,
                    start_ns=times[0],
                    end_ns=times[1],
                    last=piece.last,
                    verified=piece.checksum != NOT_TAKEN,
                )
            )
        if receiver.written(size):
            self._leave(receiver)

    def _done(self, link: Link, piece: Piece, *, written: bool) -> None:
        if not link.socket.closed:
            self._send(link, PieceDone(room=piece.room, key=piece.key, number=piece.number, written=written))

    def _send(self, link: Link, message: ToPrefill) -> None:
        link.socket.send(self._encode(message), zmq.NOBLOCK)

    # ------------------------------------------------------------ time

    def _look_at_times(self) -> None:
        now, limits = self.now(), self._limits
        for link, why in self._links.silent(now, limits.silence):
            self._lose(link, why)
        for receiver in self._untold:
            receiver.untold = now - receiver.created_ns <= limits.bootstrap
        for receiver in list(self._rooms.values()):
            if receiver.state is KVPoll.BOOTSTRAPPING and now - receiver.created_ns > limits.bootstrap:
                asked = receiver.asked
                why = (
                    f"prefill server {asked.host}:{asked.port} was not found in {limits.bootstrap / 1e9:g} s"
                )
                self.end(receiver, why, tell=False, status=LOST)
            elif receiver.init_ns and now - receiver.init_ns > limits.waiting:
                why = f"no whole KV came from the prefill side in {limits.waiting / 1e9:g} s"
                self.end(receiver, why, tell=True)

    def _lose(self, link: Link, why: str) -> None:
        """A prefill rank is gone: its rooms fail; what is being written ends first, in pages that are still held."""
        for receiver in list(self._rooms.values()):
            if receiver.link == link.identity:
                self.end(receiver, f"the prefill server at {link.address} {why}", tell=False, status=LOST)
