"""PUSH/PULL channels between components: the same sockets for threads, processes and hosts.

`inproc://` joins threads of one process (they share one zmq context), `ipc://` joins processes,
`tcp://` hosts. High-water marks are off, as in SGLang: queues grow in memory and nothing is lost;
only the event channel has one, because events may be dropped and requests may not.
Imports: errors, events.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from sgviz.errors import Unavailable
from sgviz.events.ring import pack
from sgviz.events.schema import Event

T = TypeVar("T")
LONGEST_FOLDER = 81  # of the 107 bytes that a socket's path may have; the rest is its name
SHORT_FOLDER = "/tmp"
EVENT_HWM = 4096  # batches of events that may wait in a full socket before they are dropped


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of one engine; SGLang's names, and `events_ipc_name` for the event stream."""

    instance_id: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    tokenizer_ipc_name: str
    events_ipc_name: str

    @classmethod
    def for_threads(cls) -> PortArgs:
        """Addresses inside one process."""
        return cls._under("inproc://sgviz-")

    @classmethod
    def for_processes(cls) -> tuple[PortArgs, tempfile.TemporaryDirectory[str]]:
        """Addresses in a fresh private folder; the caller removes the folder after closing the sockets."""
        folder = tempfile.TemporaryDirectory(prefix="sgviz-")
        if len(folder.name) > LONGEST_FOLDER:  # the kernel's limit for a socket's path
            folder.cleanup()
            folder = tempfile.TemporaryDirectory(prefix="sgviz-", dir=SHORT_FOLDER)
        return cls._under(f"ipc://{folder.name}/"), folder

    def for_worker(self, number: int) -> PortArgs:
        """Those of a tokenizer worker, to which the main process's router is scheduler and detokenizer."""
        base = self.tokenizer_ipc_name.removesuffix("-tokenizer")
        return msgspec.structs.replace(
            self,
            scheduler_input_ipc_name=f"{base}-w{number}-in",
            tokenizer_ipc_name=f"{base}-w{number}-out",
        )

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
        type: the message type, or a union of tagged structs; anything else raises a decode error.
    """

    def __init__(self, context: zmq.Context[Any], address: str, type: Any, *, bind: bool = False) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._decode = msgspec.msgpack.Decoder(type).decode
        _open(self._socket, address, bind)

    def drain(self, limit: int = 1024) -> list[T]:
        """All messages that are there now, at most `limit`; never waits."""
        out: list[T] = []
        while len(out) < limit:
            try:
                out.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return out

    def wait(self, timeout_ms: int) -> bool:
        """Block until a message is there or the time is up; says whether one is."""
        return bool(self._socket.poll(timeout_ms))

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[T]):
    """The PULL end for an asyncio loop."""

    def __init__(self, context: zmq.Context[Any], address: str, type: Any, *, bind: bool = False) -> None:
        self._socket = zmq.asyncio.Context.shadow(context).socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._decode = msgspec.msgpack.Decoder(type).decode
        _open(self._socket, address, bind)

    async def recv(self) -> T:
        message: T = self._decode(await self._socket.recv())
        return message

    def close(self) -> None:
        self._socket.close(linger=0)


def _open(socket: Any, address: str, bind: bool) -> None:
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
