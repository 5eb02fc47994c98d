"""Both sides of a transfer in one process, with real sockets and a clock that is turned by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import zmq

from sgviz.config import Settings
from sgviz.disaggregation import DecodeManager, PrefillManager
from sgviz.disaggregation.bootstrap_server import BootstrapServer
from sgviz.disaggregation.protocol import KVAux, KVPoll, KVReceiver, KVSender
from sgviz.events import Tracer
from sgviz.events.clock import VirtualClock
from sgviz.worker.mock_worker import MockWorker, mock_info

SECOND = 10**9


class ListSink:
    def __init__(self) -> None:
        self.events: list[object] = []

    def put(self, event: object) -> None:
        self.events.append(event)

    def flush(self) -> None:
        pass


@dataclass
class Pair:
    """A prefill manager, a decode manager, and the bootstrap server between them."""

    backend: str = "auto"
    checksum: bool = False
    piece_tokens: int = 4
    source: MockWorker = field(default_factory=lambda: MockWorker(mock_info(), threaded=False))
    target: MockWorker = field(default_factory=lambda: MockWorker(mock_info(), threaded=False))

    def __post_init__(self) -> None:
        self.clock = VirtualClock(SECOND)
        self.context = zmq.Context()
        self.server = BootstrapServer()
        self.sink = ListSink()
        self.settings = Settings.build(
            disaggregation_transfer_backend=self.backend,
            disaggregation_checksum=self.checksum,
            disaggregation_bootstrap_timeout=60.0,
            disaggregation_waiting_timeout=90.0,
        )
        self.prefill = self.new_prefill()
        self.decode = DecodeManager(
            self.settings, self.target, self.context, self.clock, self.tracer(), threaded=False
        )

    def tracer(self) -> Tracer:
        return Tracer("scheduler", self.sink, self.clock)

    def new_prefill(self) -> PrefillManager:
        return PrefillManager(
            self.settings,
            self.source,
            self.context,
            self.clock,
            self.tracer(),
            bootstrap=(self.server.host, self.server.port),
            piece_tokens=self.piece_tokens,
            threaded=False,
        )

    def pump(self, until: Callable[[], bool], sides: str = "pd") -> None:
        """Drive both sides until something holds; sockets and threads take a moment."""
        for _ in range(4000):
            if "p" in sides:
                self.prefill.pump()
            if "d" in sides:
                self.decode.pump()
            if until():
                return
            time.sleep(0.001)
        raise AssertionError("it did not come to that")

    def settle(self) -> None:
        """Let what is on its way arrive."""
        for _ in range(30):
            self.prefill.pump()
            self.decode.pump()
            time.sleep(0.001)

    def receiver(self, room: int, tokens: int = 10) -> KVReceiver:
        return self.decode.create_receiver("r", room, self.server.host, self.server.port, tokens)

    def met(self, room: int, slots: list[int], prefix: int = 0) -> tuple[KVSender, KVReceiver]:
        """Both sides of a room, destination told."""
        sender, receiver = self.prefill.create_sender("r", room, len(slots)), self.receiver(room)
        self.pump(lambda: receiver.poll() == KVPoll.WAITING_FOR_INPUT)
        receiver.init(np.array(slots, dtype=np.int64), prefix)
        self.pump(lambda: sender.poll() == KVPoll.WAITING_FOR_INPUT)
        return sender, receiver

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.server.close()
        self.context.term()


def write(worker: MockWorker, slots: list[int], ids: list[int]) -> None:
    data = memoryview(np.array(ids, dtype=np.int64)).cast("B")
    worker.write_kv(np.array(slots, dtype=np.int64), data).result()


def read(worker: MockWorker, slots: list[int]) -> list[int]:
    out = np.zeros(len(slots), dtype=np.int64)
    worker.read_kv(np.array(slots, dtype=np.int64), memoryview(out).cast("B")).result()
    return out.tolist()


def aux(room: int, token: int = 7) -> KVAux:
    return KVAux(room=room, first_token=token)
