"""Load snapshots of ranks on other hosts, on their way to the controller over ZMQ.

Mirrors SGLang's PUSH of snapshots between nodes. There they arrive in the same slots as those of this host's ranks, so
that the controller reads all alike. Imports: channel (addresses), data_parallel, messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from sgviz.channel import bind_tcp
from sgviz.data_parallel.load_snapshots import SnapshotFile
from sgviz.messages.parallel import LoadSnapshot

log = logging.getLogger(__name__)

KEPT = 16  # snapshots that may be on their way: what is not taken soon is old
WAIT_MS = 100


class SnapshotSender:
    """The rank's end: what finds no room is dropped, as the next one says more."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.set_hwm(KEPT)
        self._socket.linger = 0
        self._socket.set(zmq.IPV6, "[" in address)
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode

    def put(self, snapshot: LoadSnapshot) -> None:
        with suppress(zmq.Again):
            self._socket.send(self._encode(snapshot), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(linger=0)


class SnapshotReceiver:
    """The controller's end: a thread that puts each snapshot into its slot.

    Args:
        slots: of all ranks; those of `ranks` come from here.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, slots: SnapshotFile, ranks: Collection[int]
    ) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        bind_tcp(self._socket, address)
        self._slots, self._ranks = slots, ranks
        self._decode = msgspec.msgpack.Decoder(LoadSnapshot).decode
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgviz-loads", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(WAIT_MS):
                self._take(self._socket.recv())
        self._socket.close(linger=0)

    def _take(self, message: bytes) -> None:
        try:
            snapshot = self._decode(message)
        except msgspec.DecodeError:
            log.warning("%d bytes at the port of load snapshots are none", len(message))
            return
        if snapshot.dp_rank in self._ranks:
            self._slots.put(snapshot)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
