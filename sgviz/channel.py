"""PUSH/PULL channels between components: the same sockets for threads, processes and hosts.

`inproc://` joins threads of one process (they share one zmq context), `ipc://` joins processes,
`tcp://` hosts. High-water marks are off, as in SGLang: queues grow in memory and nothing is lost;
only the event channel has one, because events may be dropped and requests may not.
Imports: errors, events.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from sgviz.errors import Unavailable
from sgviz.events.ring import pack
from sgviz.events.schema import Event

T = TypeVar("T")
log = logging.getLogger(__name__)

LONGEST_FOLDER = 81  # of the 107 bytes that a socket's path may have; the rest is its name
SHORT_FOLDER = "/tmp"
EVENT_HWM = 4096  # batches of events that may wait in a full socket before they are dropped


class HostAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks on other hosts reach this engine, all tcp://; `ranks`: where each of them gets its messages."""

    tokenizer: str
    detokenizer: str
    events: str
    loads: str
    ranks: dict[int, str]

    def as_ports(self, instance_id: str) -> PortArgs:
        """What a rank on another host is given in place of this host's addresses."""
        return PortArgs(
            instance_id=instance_id,
            scheduler_input_ipc_name="",
            detokenizer_ipc_name=self.detokenizer,
            tokenizer_ipc_name=self.tokenizer,
            events_ipc_name=self.events,
            across=self,
        )


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of one engine; SGLang's names, and `events_ipc_name` for the event stream.

    `across`: of an engine on several hosts, those between them.
    """

    instance_id: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    tokenizer_ipc_name: str
    events_ipc_name: str
    across: HostAddresses | None = None

    @classmethod
    def for_threads(cls) -> PortArgs:
        """Addresses inside one process."""
        return cls._under("inproc://sgviz-")

    @classmethod
    def for_processes(
        cls, across: HostAddresses | None = None
    ) -> tuple[PortArgs, tempfile.TemporaryDirectory[str]]:
        """Addresses in a fresh private folder; the caller removes the folder after closing the sockets."""
        folder = tempfile.TemporaryDirectory(prefix="sgviz-")
        if len(folder.name) > LONGEST_FOLDER:  # the kernel's limit for a socket's path
            folder.cleanup()
            folder = tempfile.TemporaryDirectory(prefix="sgviz-", dir=SHORT_FOLDER)
        return msgspec.structs.replace(cls._under(f"ipc://{folder.name}/"), across=across), folder

    def for_worker(self, number: int) -> PortArgs:
        """Those of a tokenizer worker, to which the main process's router is scheduler and detokenizer."""
        base = self.tokenizer_ipc_name.removesuffix("-tokenizer")
        return msgspec.structs.replace(
            self,
            scheduler_input_ipc_name=f"{base}-w{number}-in",
            tokenizer_ipc_name=f"{base}-w{number}-out",
        )

    def for_rank(self, rank: int) -> PortArgs:
        """Those of a data parallel rank, which hears the controller where a lone scheduler hears the main process."""
        own = self.across.ranks.get(rank) if self.across else None
        return msgspec.structs.replace(
            self, scheduler_input_ipc_name=own or f"{self.scheduler_input_ipc_name}-r{rank}"
        )

    def inbox(self, name: str) -> tuple[str, ...]:
        """Where `name` (tokenizer, detokenizer or events) listens: also for other hosts, if there are any."""
        own: str = getattr(self, f"{name}_ipc_name")
        return (own, getattr(self.across, name)) if self.across else (own,)

    @property
    def loads_path(self) -> str:
        """Where ranks that are processes tell their loads: a file beside the sockets."""
        return self.tokenizer_ipc_name.removeprefix("ipc://").removesuffix("-tokenizer") + "-loads"

    @property
    def main_path(self) -> str:
        """Where the main process's app listens for its tokenizer workers: a file beside the sockets."""
        return self.tokenizer_ipc_name.removeprefix("ipc://").removesuffix("-tokenizer") + "-http"

    @classmethod
    def _under(cls, base: str) -> PortArgs:
        name = uuid.uuid4().hex[:12]
        return cls(
            instance_id=name,
            scheduler_input_ipc_name=f"{base}{name}-scheduler",
            detokenizer_ipc_name=f"{base}{name}-detokenizer",
            tokenizer_ipc_name=f"{base}{name}-tokenizer",
            events_ipc_name=f"{base}{name}-events",
        )


class Sender:
    """The PUSH end. Safe for one thread at a time."""

    def __init__(self, context: zmq.Context[Any], address: str, *, bind: bool = False, hwm: int = 0) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(hwm)
        self._socket.linger = 0
        self._encode = msgspec.msgpack.Encoder().encode
        _open(self._socket, address, bind)

    def send(self, message: msgspec.Struct) -> None:
        """Queue the message; returns at once.

        Raises:
            Unavailable: this end is bound and nobody is connected: the other process is gone.
        """
        try:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise Unavailable("the next component of the pipeline is gone") from None

    def wait_for_peer(self, timeout_ms: int) -> bool:
        """Block until somebody is connected to this bound end or the time is up; says whether somebody is."""
        return bool(self._socket.poll(timeout_ms, zmq.POLLOUT))

    def send_events(self, events: Sequence[Event]) -> bool:
        """Queue a batch of events, at least one, if there is room; says whether there was."""
        try:
            self._socket.send(self._encode(pack(events, self._encode)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close, giving queued messages `linger_ms` to leave."""
        self._socket.close(linger=linger_ms)


class Receiver(Generic[T]):
    """The PULL end for a thread: drain without waiting, or wait in a poll.

    Args:
        address: one, or several to bind to. type: the message type, or a union of tagged structs; anything else
            raises a decode error, or is left out with a warning where other hosts reach this end.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str | Sequence[str], type: Any, *, bind: bool = False
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._decode = msgspec.msgpack.Decoder(type).decode
        self._from_afar = _open(self._socket, address, bind)
        self._wakes: Callable[[], Sequence[zmq.Socket[Any] | int]] | None = None

    def wake_on(self, wakes: Callable[[], Sequence[zmq.Socket[Any] | int]]) -> None:
        """`wait` ends too when one of these sockets or files, asked for at each wait, is readable."""
        self._wakes = wakes

    def drain(self, limit: int = 1024) -> list[T]:
        """All messages that are there now, at most `limit`; never waits."""
        out: list[T] = []
        while len(out) < limit:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                out.append(self._decode(message))
            except msgspec.DecodeError as error:
                _leave_out(message, error, self._from_afar)
        return out

    def wait(self, timeout_ms: int) -> bool:
        """Block until a message is there or the time is up (-1: it never is); says whether one is."""
        if self._wakes is None:
            return bool(self._socket.poll(timeout_ms))
        poller = zmq.Poller()
        for each in (self._socket, *self._wakes()):
            poller.register(each, zmq.POLLIN)
        return any(source is self._socket for source, _ in poller.poll(timeout_ms))

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[T]):
    """The PULL end for an asyncio loop."""

    def __init__(
        self, context: zmq.Context[Any], address: str | Sequence[str], type: Any, *, bind: bool = False
    ) -> None:
        self._socket = zmq.asyncio.Context.shadow(context).socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._decode = msgspec.msgpack.Decoder(type).decode
        self._from_afar = _open(self._socket, address, bind)

    async def recv(self) -> T:
        while True:
            message = await self._socket.recv()
            try:
                decoded: T = self._decode(message)
            except msgspec.DecodeError as error:
                _leave_out(message, error, self._from_afar)
            else:
                return decoded

    def close(self) -> None:
        self._socket.close(linger=0)


def turn_strangers_away(socket: Any) -> None:
    """Before a bind: who does not speak ZeroMQ's present protocol gets no connection.

    Of older ones any bytes at all are messages, and a port scan would be a peer that is given its share of them.
    """
    # this alone does it: nobody answers for the domain, so nobody is authenticated
    socket.set(zmq.ZAP_DOMAIN, b"sgviz")


def bind_tcp(socket: Any, address: str) -> None:
    """Bind to an address that other hosts reach."""
    turn_strangers_away(socket)
    socket.set(zmq.IPV6, "[" in address)
    socket.bind(address)


def _open(socket: Any, address: str | Sequence[str], bind: bool) -> bool:
    """Says whether other hosts may connect to it."""
    each_one = (address,) if isinstance(address, str) else address
    for each in each_one:
        if not bind:
            socket.set(zmq.IPV6, each.startswith("tcp://["))
            socket.connect(each)
        elif each.startswith("tcp://"):
            bind_tcp(socket, each)
        else:
            socket.bind(each)
    return bind and any(each.startswith("tcp://") for each in each_one)


def _leave_out(message: bytes, error: msgspec.DecodeError, from_afar: bool) -> None:
    """A stranger's message is no reason to end; between components of one host it is a fault of ours."""
    if not from_afar:
        raise error
    log.warning("%d bytes at a port for other hosts are no message of the engine: %s", len(message), error)
