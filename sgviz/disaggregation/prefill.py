"""PrefillManager: takes destinations, reads KV into buffers, tells the decode side, and waits for nothing.

One ROUTER socket for all decode ranks. A destination may come before its request does, and is kept then. Whatever
belongs to no open room is answered with a failure for that room alone. A room ends when its decode rank was silent for
12.5 s (heartbeats), has not told a destination in 300 s (bootstrap_timeout), or confirms no piece for 300 s
(waiting_timeout). Mirrors SGLang's MooncakeKVManager on the prefill side.
Imports: channel, config, disaggregation, errors, events, worker protocol.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from sgviz.channel import turn_strangers_away
from sgviz.config import Settings
from sgviz.disaggregation import shared_memory
from sgviz.disaggregation.bell import Bell
from sgviz.disaggregation.bootstrap_client import Jobs, register_dp_rank
from sgviz.disaggregation.fake import FakeTransfer
from sgviz.disaggregation.heart import HeartThread, PrefillHeart, bracketed
from sgviz.disaggregation.limits import Limits, wait_ms_of
from sgviz.disaggregation.lobby import Lobby, Refusal
from sgviz.disaggregation.peers import Peer
from sgviz.disaggregation.prefill_route import make_route, piece_tokens_of, register
from sgviz.disaggregation.protocol import LOST, KVPoll, KVSender, Wake
from sgviz.disaggregation.sender import OutPiece, Sender
from sgviz.disaggregation.staging import Buffer
from sgviz.disaggregation.wire import (
    FAKE_BOOTSTRAP_HOST,
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
from sgviz.errors import BadRequest, SgvizError, StartupError
from sgviz.events import Tracer, schema
from sgviz.events.clock import Clock
from sgviz.worker.protocol import MovesKV


class PrefillManager:
    """Satisfies `protocol.PrefillKVManager`; see `factory.make_kv_manager` for most arguments.

    Args:
        bootstrap: address of the BootstrapServer; None: decode sides learn of this rank in another way (`route`).
        piece_tokens: most tokens of a piece; by default what PIECE_BYTES holds.
        threaded: signs of life are answered by a thread; False: by `pump`.
    """

    def __init__(
        self,
        settings: Settings,
        worker: MovesKV,
        context: zmq.Context[Any],
        clock: Clock,
        trace: Tracer,
        *,
        dp_rank: int = 0,
        bootstrap: tuple[str, int] | None = None,
        piece_tokens: int | None = None,
        threaded: bool = True,
    ) -> None:
        self._own = settings.disaggregation
        self._limits = Limits.of(self._own)
        self._worker, self._clock, self._trace = worker, clock, trace
        self._layout = worker.kv_layout
        self.piece_tokens = piece_tokens or piece_tokens_of(self._layout.wire_bytes)
        self._fake = self._own.disaggregation_transfer_backend == "fake"
        self._rooms: dict[int, Sender] = {}
        self._lobby = Lobby()
        self._peers: dict[bytes, Peer] = {}
        self._lost: set[bytes] = set()
        self._reading: deque[tuple[Sender, OutPiece]] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToPrefill).decode
        self._bootstrap, self._dp_rank, self._jobs = bootstrap, dp_rank, Jobs()
        host = self._own.disaggregation_bootstrap_host or settings.serve.host
        self._open(context, host)
        self._bell = Bell()
        ports = (self._port, self._heart.port)
        try:
            self.route = make_route(settings, self._layout, host, ports, dp_rank)
        except StartupError:
            self._heart.close()
            self._socket.close()
            self._bell.close()
            raise
        self._thread = HeartThread(self._heart.beat, self._limits.interval / 1e9) if threaded else None
        if bootstrap is not None:
            try:
                register(bootstrap, self.route)
            except StartupError:
                self.close()
                raise

    def _open(self, context: zmq.Context[Any], host: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._socket.set(zmq.IPV6, ":" in host)
        turn_strangers_away(self._socket)
        try:
            self._port = self._socket.bind_to_random_port(f"tcp://{bracketed(host)}")
            self._heart = PrefillHeart(context, host, self._clock)
        except zmq.ZMQError as error:
            self._socket.close()
            raise StartupError(f"the KV channel cannot be opened at {host}: {error}") from error

    def create_sender(self, rid: str, room: int, num_tokens: int, *, host: str = "") -> KVSender:
        """Raises BadRequest if the room is taken. `host`: FAKE_BOOTSTRAP_HOST: there is no other side."""
        if self._fake or host == FAKE_BOOTSTRAP_HOST:
            return FakeTransfer(room)
        if room in self._rooms:
            other = self._rooms[room].rid
            raise BadRequest(f"bootstrap_room {room} is taken by request {other}", param="bootstrap_room")
        sender = self._rooms[room] = Sender(self, rid, room, self._clock.now())
        if self._bootstrap is not None and not self.route.follow_bootstrap_room and self.route.dp_size > 1:
            at, rank = self._bootstrap, self._dp_rank
            self._jobs.submit(lambda: register_dp_rank(*at, room, rank))
        early = self._lobby.come(room)
        if isinstance(early, Refusal):
            self._ended_there(sender, early)
        elif early is not None:
            self._greet(early.identity, early.hello)
            if early.destination is not None:
                self._destine(early.identity, early.destination)
        return sender

    @property
    def busy(self) -> bool:
        return bool(self._rooms or self._reading or any(peer.sent for peer in self._peers.values()))

    def wakes(self) -> list[Wake]:
        return [self._socket, self._bell.fd]

    @property
    def wait_ms(self) -> int:
        return wait_ms_of(self._layout)

    def pump(self) -> None:
        self._bell.silence()
        if self._thread is None:
            self._heart.beat()
        self._drain()
        self._pass_on()
        self.feed()
        self._look_at_times()

    def close(self) -> None:
        """End all rooms, tell their decode sides, and leave nothing in shared memory."""
        for sender in list(self._rooms.values()):
            self.end(sender, "the prefill server is shutting down", tell=True, status=LOST)
        for _, piece in self._reading:
            if piece.copy is not None:
                piece.copy.result()
        self._reading.clear()
        if self._thread is not None:
            self._thread.close()
        self._heart.close()
        self._socket.close(linger=500)
        for peer in self._peers.values():
            if peer.staging is not None:
                peer.staging.close()
        self._peers.clear()
        if self.route.token_name:
            shared_memory.unlink(self.route.token_name)
        self._jobs.close()
        self._bell.close()

    # ------------------------------------------------------------ for Sender

    def now(self) -> int:
        return self._clock.now()

    def feed(self) -> None:
        """Begin to read queued pieces, the oldest request's first, while there are buffers."""
        for sender in [each for each in self._rooms.values() if each.queued and each.destined]:
            assert sender.peer is not None
            while sender.open and sender.queued and (buffer := self._buffer(sender)) is not None:
                self._read(sender, sender.queued.popleft(), buffer)

    def end(self, sender: Sender, why: str, *, tell: bool, status: int = 500) -> None:
        """The transfer failed. `tell`: the decode side does not know."""
        now = self._clock.now()
        sender.fail(why, now, status)
        if self._rooms.get(sender.room) is sender:
            del self._rooms[sender.room]
        if not tell:
            return
        if sender.peer is None:
            self._lobby.end(sender.room, Refusal(why, status), now)
        else:
            self._send(sender.peer, Failed(room=sender.room, key=sender.key, why=why, status=status))

    # ------------------------------------------------------------ what comes

    def _drain(self) -> None:
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(frames[0])
            except (msgspec.DecodeError, IndexError):
                continue  # not of our kind: nobody to answer to
            self._take(identity, message)

    def _take(self, identity: bytes, message: ToPrefill) -> None:
        if identity in self._lost:
            return  # its heart tells it so, and it comes back under another name
        match message:
            case Hello():
                self._greet(identity, message)
            case Destination():
                self._destine(identity, message)
            case PieceDone():
                self._confirm(identity, message)
            case Mapped():
                peer = self._peers.get(identity)
                if peer is not None and peer.staging is not None:
                    peer.staging.mapped(message.segment)
            case Abort():
                self._aborted(identity, message)

    def _greet(self, identity: bytes, message: Hello) -> None:
        now = self._clock.now()
        self._peers.setdefault(identity, Peer(message.carrier, now))
        sender = self._rooms.get(message.room)
        if sender is None:
            refusal = self._lobby.greet(identity, message, now)
            if refusal is not None:
                self._refuse(identity, message, *refusal)
        elif sender.peer is None:
            sender.peer, sender.key = identity, message.key
        elif (sender.peer, sender.key) != (identity, message.key):
            text = f"bootstrap_room {message.room}: the room is taken by request {sender.rid}"
            self._refuse(identity, message, text, 400)

    def _destine(self, identity: bytes, message: Destination) -> None:
        sender = self._rooms.get(message.room)
        if sender is not None and (sender.peer, sender.key) == (identity, message.key):
            if not sender.destined:
                sender.bind(message, self._peers[identity].carrier)
        elif not self._lobby.destine(identity, message):
            text = f"bootstrap_room {message.room}: the prefill server knows no such request"
            self._refuse(identity, message, text, 500)

    def _refuse(self, identity: bytes, message: Hello | Destination, why: str, status: int) -> None:
        self._send(identity, Failed(room=message.room, key=message.key, why=why, status=status))

    def _confirm(self, identity: bytes, message: PieceDone) -> None:
        peer = self._peers.get(identity)
        buffer = peer.sent.pop((message.key, message.number), None) if peer is not None else None
        if peer is None or buffer is None:
            return  # late, or said twice
        assert peer.staging is not None
        peer.staging.give_back(buffer)
        sender = self._rooms.get(message.room)
        if sender is None or (sender.peer, sender.key) != (identity, message.key) or not message.written:
            return
        if sender.confirmed(self._clock.now()):
            del self._rooms[message.room]

    def _aborted(self, identity: bytes, message: Abort) -> None:
        peer, sender = self._peers.get(identity), self._rooms.get(message.room)
        if peer is not None:
            peer.reclaim(message.key)
        if sender is None:
            self._lobby.leave(identity, message, self._clock.now())
        elif (sender.peer, sender.key) == (identity, message.key):
            self._ended_there(sender, Refusal(message.why, message.status))

    def _ended_there(self, sender: Sender, refusal: Refusal) -> None:
        why = f"the decode side ended it: {refusal.why}"
        self.end(sender, why, tell=False, status=refusal.status)

    # ------------------------------------------------------------ what goes

    def _buffer(self, sender: Sender) -> Buffer | None:
        assert sender.peer is not None
        peer = self._peers[sender.peer]
        try:
            buffer = peer.take(
                self.piece_tokens * self._layout.wire_bytes, or_tcp="tcp" in self.route.carriers
            )
        except SgvizError as error:
            self.end(sender, error.message, tell=True)
            return None
        sender.stats = replace(sender.stats, backend=peer.carrier)
        return buffer

    def _read(self, sender: Sender, piece: OutPiece, buffer: Buffer) -> None:
        size = len(piece.slots) * self._layout.wire_bytes
        piece.buffer = buffer
        if len(piece.slots):
            piece.copy = self._worker.read_kv(piece.slots, buffer.memory[:size])
            piece.copy.on_done(self._bell.ring)
        sender.reading += 1
        self._reading.append((sender, piece))

    def _pass_on(self) -> None:
        """Send the pieces that were read, in the order in which they were to be."""
        while self._reading and (self._reading[0][1].copy is None or self._reading[0][1].copy.done()):
            sender, piece = self._reading.popleft()
            sender.reading -= 1
            try:
                times = piece.copy.result() if piece.copy is not None else (self.now(),) * 2
            except Exception as error:
                self._drop(sender, piece)
                if sender.open:
                    self.end(sender, f"its KV could not be read: {error}", tell=True)
                continue
            if sender.open:
                self._pass_piece(sender, piece, times)
            else:
                self._drop(sender, piece)

    def _pass_piece(self, sender: Sender, piece: OutPiece, times: tuple[int, ...]) -> None:
        assert piece.buffer is not None and sender.peer is not None
        size, buffer = len(piece.slots) * self._layout.wire_bytes, piece.buffer
        checked = self._own.disaggregation_checksum
        message = Piece(
            room=sender.room,
            key=sender.key,
            number=piece.number,
            start=piece.start,
            tokens=len(piece.slots),
            size=size,
            segment=buffer.segment,
            offset=buffer.offset,
            checksum=zlib.crc32(buffer.memory[:size]) if checked else -1,
            last=piece.aux is not None,
            aux=piece.aux,
        )
        self._peers[sender.peer].sent[sender.key, piece.number] = buffer
        self._send(sender.peer, message, None if buffer.segment else buffer.memory[:size])
        nominal = len(piece.slots) * self._layout.nominal_bytes
        sender.sent(nominal)
        if self._trace.on:
            body = schema.KvSent(
                rid=sender.rid, room=sender.room, piece=piece.number, start=piece.start, tokens=len(piece.slots),
                bytes=nominal, start_ns=times[0], end_ns=times[1], last=message.last, cached=piece.cached,
            )  # fmt: skip
            self._trace.emit(body)

    def _drop(self, sender: Sender, piece: OutPiece) -> None:
        """Read for nothing: its buffer is free, unless the decode rank is lost and the buffers with it."""
        peer = self._peers.get(sender.peer or b"")
        if peer is not None and peer.staging is not None and piece.buffer is not None:
            peer.staging.give_back(piece.buffer)

    def _send(self, identity: bytes, message: ToDecode, data: memoryview | None = None) -> None:
        frames = [identity, self._encode(message)] + ([data] if data is not None else [])
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=data is None)

    # ------------------------------------------------------------ time

    def _look_at_times(self) -> None:
        now, limit = self._clock.now(), self._limits.bootstrap
        for identity, peer in list(self._peers.items()):
            silent = now - max(peer.since_ns, self._heart.heard(identity))
            if silent > self._limits.silence:
                self._lose(identity, peer, silent)
        for sender in list(self._rooms.values()):
            if sender.state is KVPoll.BOOTSTRAPPING and now - sender.created_ns > limit:
                self.end(sender, f"no decode side has told where its KV goes in {limit / 1e9:g} s", tell=True)
            elif sender.open_pieces and now - sender.moved_ns > self._limits.waiting:
                why = f"the decode side has taken nothing for {self._limits.waiting / 1e9:g} s"
                self.end(sender, why, tell=True)
        for early in self._lobby.overdue(now, limit):
            here = f" to prefill rank {self._dp_rank}" if self.route.dp_size > 1 else ""
            text = f"bootstrap_room {early.hello.room}: no request with it came{here} in {limit / 1e9:g} s"
            self._refuse(early.identity, early.hello, text, 500)

    def _lose(self, identity: bytes, peer: Peer, silent: int) -> None:
        """A decode rank is gone. Its buffers are never used again: should it live, it may still read them."""
        del self._peers[identity]
        self._lost.add(identity)
        if peer.staging is not None:
            peer.staging.close()
        self._heart.lose(identity)
        self._lobby.lose(identity)
        for sender in list(self._rooms.values()):
            if sender.peer == identity:
                why = f"the decode side was silent for {silent / 1e9:.1f} s"
                self.end(sender, why, tell=False, status=LOST)
