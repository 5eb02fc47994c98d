"""PrefillManager: takes destinations, reads KV into buffers, tells the decode side, and waits for nothing.

A destination may come before its request does, and is kept then. Whatever belongs to no open room is answered with a
failure for that room alone. A room ends when its decode rank was silent for 12.5 s (heartbeats), has not told a
destination in 300 s (bootstrap_timeout), or confirms no piece for 300 s (waiting_timeout).
Mirrors SGLang's MooncakeKVManager on the prefill side.
Imports: config, disaggregation, errors, events, worker protocol.
"""

from __future__ import annotations

from typing import Any

import zmq

from sgviz.config import Settings
from sgviz.disaggregation import shared_memory
from sgviz.disaggregation.bootstrap_client import register_dp_rank
from sgviz.disaggregation.checksum import checksum_of
from sgviz.disaggregation.copies import Copies, Times
from sgviz.disaggregation.fake import FakeTransfer
from sgviz.disaggregation.lobby import Lobby, Refusal
from sgviz.disaggregation.peers import Peers
from sgviz.disaggregation.prefill_route import make_route, piece_tokens_of, register
from sgviz.disaggregation.protocol import LOST, KVPoll, KVSender, Wake
from sgviz.disaggregation.reading import Reading
from sgviz.disaggregation.sender import OutPiece, Sender
from sgviz.disaggregation.side import Side
from sgviz.disaggregation.wire import (
    Abort,
    Destination,
    Failed,
    Hello,
    Mapped,
    PieceDone,
    RankRoute,
    ToDecode,
    ToPrefill,
)
from sgviz.errors import SgvizError, StartupError
from sgviz.events import Tracer, schema
from sgviz.events.clock import Clock
from sgviz.worker.protocol import MovesKV


class PrefillManager(Side[Sender]):
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
        super().__init__(settings, worker, clock, trace)
        self.piece_tokens = piece_tokens or piece_tokens_of(self._layout.wire_bytes)
        self._lobby = Lobby()
        self._bootstrap, self._dp_rank = bootstrap, dp_rank
        host = self._own.disaggregation_bootstrap_host or settings.serve.host
        try:
            self._peers = Peers(context, host, clock, self._limits, threaded=threaded)
            self._opened.callback(self._peers.close)
            self.route = self._make_route(settings, host)
            if bootstrap is not None:
                register(bootstrap, self.route)
        except StartupError:
            self._opened.close()
            raise
        copies: Copies[tuple[Sender, OutPiece]] = Copies(clock, self._bell.ring)
        or_tcp = "tcp" in self.route.carriers
        self._reading = Reading(worker, self._peers, copies, self.piece_tokens, or_tcp=or_tcp)

    def _make_route(self, settings: Settings, host: str) -> RankRoute:
        route = make_route(settings, self._layout, host, self._peers.ports, self._dp_rank)
        if route.token_name:
            self._opened.callback(shared_memory.unlink, route.token_name)
        return route

    def create_sender(self, rid: str, room: int, num_tokens: int, *, host: str = "") -> KVSender:
        """Raises BadRequest if the room is taken. `host`: FAKE_BOOTSTRAP_HOST: there is no other side."""
        if self._is_fake(host):
            return FakeTransfer(room)
        self._check_free(room)
        sender = self._rooms[room] = Sender(self, rid, room, self.now())
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
        return bool(self._rooms or self._reading or self._peers.hold_buffers)

    def wakes(self) -> list[Wake]:
        return [self._peers.socket, self._bell.fd]

    def pump(self) -> None:
        self._bell.silence()
        self._peers.beat()
        for identity, message in self._peers.receive():
            self._take(identity, message)
        self._pass_on()
        self.feed()
        self._look_at_times()

    def close(self) -> None:
        """End all rooms, tell their decode sides, and leave nothing in shared memory."""
        for sender in list(self._rooms.values()):
            self.end(sender, "the prefill server is shutting down", tell=True, status=LOST)
        self._pass_on(wait=True)
        self._opened.close()

    # ------------------------------------------------------------ for Sender

    def feed(self) -> None:
        """Begin to read queued pieces, the oldest request's first, while there are buffers."""
        for sender in [each for each in self._rooms.values() if each.queued and each.destined]:
            try:
                self._reading.begin(sender)
            except SgvizError as error:
                self.end(sender, error.message, tell=True)

    def end(self, sender: Sender, why: str, *, tell: bool, status: int = 500) -> None:
        """The transfer failed. `tell`: the decode side does not know."""
        sender.fail(why, self.now(), status)
        self._leave(sender)
        if not tell:
            return
        if sender.peer is None:
            self._lobby.end(sender.room, Refusal(why, status), self.now())
        else:
            failed = Failed(room=sender.room, key=sender.key, why=why, status=status)
            self._peers.tell_end(sender.peer, failed, self.now())

    # ------------------------------------------------------------ what comes

    def _take(self, identity: bytes, message: ToPrefill) -> None:
        match message:
            case Hello():
                self._greet(identity, message)
            case Destination():
                self._destine(identity, message)
            case PieceDone():
                self._confirm(identity, message)
            case Mapped():
                if (peer := self._peers.get(identity)) is not None:
                    peer.mapped(message.segment)
            case Abort():
                self._aborted(identity, message)

    def _greet(self, identity: bytes, message: Hello) -> None:
        now = self.now()
        self._peers.meet(identity, message.carrier, now)
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
        peer.give_back(buffer)
        sender = self._rooms.get(message.room)
        if sender is None or (sender.peer, sender.key) != (identity, message.key) or not message.written:
            return
        if sender.confirmed(self.now()):
            self._leave(sender)

    def _aborted(self, identity: bytes, message: Abort) -> None:
        peer, sender = self._peers.get(identity), self._rooms.get(message.room)
        if peer is not None:
            peer.reclaim(message.key)
        if sender is None:
            self._lobby.leave(identity, message, self.now())
        elif (sender.peer, sender.key) == (identity, message.key):
            self._ended_there(sender, Refusal(message.why, message.status))

    def _ended_there(self, sender: Sender, refusal: Refusal) -> None:
        why = f"the decode side ended it: {refusal.why}"
        self.end(sender, why, tell=False, status=refusal.status)

    # ------------------------------------------------------------ what goes

    def _pass_on(self, *, wait: bool = False) -> None:
        """Send the pieces that were read, in the order in which they were to be. `wait`: for those being read."""
        for sender, piece, outcome in self._reading.over(wait=wait):
            if sender.open and not isinstance(outcome, Exception):
                self._pass_piece(sender, piece, outcome)
                continue
            self._reading.drop(sender, piece)
            if sender.open:
                self.end(sender, f"its KV could not be read: {outcome}", tell=True)

    def _pass_piece(self, sender: Sender, piece: OutPiece, times: Times) -> None:
        assert piece.buffer is not None and sender.peer is not None
        tokens, buffer = len(piece.slots), piece.buffer
        data = buffer.memory[: tokens * self._layout.wire_bytes]
        checksum = checksum_of(data, wanted=self._own.disaggregation_checksum)
        message = piece.message(sender.room, sender.key, len(data), checksum)
        self._peers[sender.peer].sent[sender.key, piece.number] = buffer
        self._send(sender.peer, message, None if buffer.segment else data)
        nominal = tokens * self._layout.nominal_bytes
        sender.sent(nominal)
        if self._trace.on:
            body = schema.KvSent(
                rid=sender.rid, room=sender.room, piece=piece.number, start=piece.start, tokens=tokens,
                bytes=nominal, start_ns=times[0], end_ns=times[1], last=message.last, cached=piece.cached,
            )  # fmt: skip
            self._trace.emit(body)

    def _send(self, identity: bytes, message: ToDecode, data: memoryview | None = None) -> None:
        self._peers.send(identity, message, data)

    # ------------------------------------------------------------ time

    def _look_at_times(self) -> None:
        now, limit = self.now(), self._limits.bootstrap
        for identity, silent in self._peers.silent(now):
            self._lose(identity, silent)
        self._peers.tell_again(now)
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

    def _lose(self, identity: bytes, silent: int) -> None:
        """A decode rank is gone, and its rooms with it."""
        self._lobby.lose(identity)
        for sender in list(self._rooms.values()):
            if sender.peer == identity:
                why = f"the decode side was silent for {silent / 1e9:.1f} s"
                self.end(sender, why, tell=False, status=LOST)
