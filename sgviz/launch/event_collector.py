"""Brings the events of child processes into the ring of the main process. Imports: channel, events."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import zmq

from sgviz.channel import Receiver
from sgviz.events import RingSink
from sgviz.events.ring import EventBatch

WAIT_MS = 100


class EventCollector:
    """A thread that receives batches of events; `stop` takes in what is still on its way."""

    def __init__(self, context: zmq.Context[Any], address: str | Sequence[str], ring: RingSink) -> None:
        self._receiver: Receiver[EventBatch] = Receiver(context, address, EventBatch, bind=True)
        self._ring = ring
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgviz-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._receiver.wait(WAIT_MS):
                self._take()
        self._take()
        self._receiver.close()

    def _take(self) -> None:
        for batch in self._receiver.drain():
            self._ring.extend_packed(batch)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
