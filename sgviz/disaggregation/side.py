"""Side: what the manager of prefill and that of decode have in common, which is what `KVManager` asks of both.

Rooms by their numbers, each taken by one request; the worker whose KV travels, the clock and the time limits; the bell
that ends a scheduler's wait, and threads for what would hold it up. Mirrors SGLang's CommonKVManager.
Imports: config, disaggregation, errors, events, worker protocol.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from sgviz.config import Settings
from sgviz.disaggregation.bell import Bell
from sgviz.disaggregation.bootstrap_client import Jobs
from sgviz.disaggregation.limits import Limits, wait_ms_of
from sgviz.disaggregation.wire import FAKE_BOOTSTRAP_HOST
from sgviz.errors import BadRequest
from sgviz.events import Tracer
from sgviz.events.clock import Clock
from sgviz.worker.protocol import MovesKV


class Transfer(Protocol):
    """One request's half of a transfer: a Sender or a Receiver."""

    rid: str
    room: int


T = TypeVar("T", bound=Transfer)


class Side(Generic[T]):
    """Holds what both managers work with; `T`: what is in its rooms."""

    def __init__(self, settings: Settings, worker: MovesKV, clock: Clock, trace: Tracer) -> None:
        self._own = settings.disaggregation
        self._limits = Limits.of(self._own)
        self._worker, self._clock, self._trace = worker, clock, trace
        self._layout = worker.kv_layout
        self._rooms: dict[int, T] = {}
        self._bell, self._jobs = Bell(), Jobs()
        self._opened = ExitStack()  # what is to be closed, the last one first
        self._opened.callback(self._bell.close)
        self._opened.callback(self._jobs.close)

    @property
    def wait_ms(self) -> int:
        return wait_ms_of(self._layout)

    def now(self) -> int:
        return self._clock.now()

    def _is_fake(self, host: str) -> bool:
        """Whether a request whose bootstrap host is `host` has no other side."""
        return self._own.disaggregation_transfer_backend == "fake" or host == FAKE_BOOTSTRAP_HOST

    def _check_free(self, room: int) -> None:
        """Raises BadRequest if another request has the room."""
        if room in self._rooms:
            other = self._rooms[room].rid
            raise BadRequest(f"bootstrap_room {room} is taken by request {other}", param="bootstrap_room")

    def _leave(self, transfer: T) -> None:
        """It has ended; its room is free, unless another has it by now."""
        if self._rooms.get(transfer.room) is transfer:
            del self._rooms[transfer.room]
