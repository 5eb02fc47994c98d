"""A sink that writes a `.sgv` file while the engine runs, without ever making it wait.

Imports: events, errors, recording.store.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from sgviz.errors import SgvizError
from sgviz.events.schema import Event, TraceDropped
from sgviz.recording.store import Header, encode_frames, encode_header, opened

logger = logging.getLogger(__name__)


class FileSink:
    """Follows a tracer or a ring (`ring.subscribe(sink)`) and appends to a `.sgv` file.

    Filling costs a list append: encoding and writing happen in a thread of its own, at most every
    `flush_s` seconds and on `close`. At most `capacity` events wait; more are dropped, counted, and
    reported in the file by `trace.dropped`. A failing disk drops too; that is logged at once, and `close` says so.

    Raises:
        SgvizError: the file cannot be created (constructor), or was not written completely (`close`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header | None = None,
        *,
        capacity: int = 500_000,
        flush_s: float = 0.2,
    ) -> None:
        self.path = Path(path)
        self.dropped = 0
        self.written = 0
        self.error: OSError | None = None
        self._capacity = capacity
        self._flush_s = flush_s
        self._pending: list[Event] = []
        self._unreported = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closed = False
        self._file = opened(self.path)
        self._write(encode_header(header or Header()))
        self._thread = threading.Thread(target=self._run, name="sgviz-file-sink", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        self.extend((event,))

    def extend(self, events: Sequence[Event]) -> None:
        """Take as many of `events` as there is room for; never waits, never raises."""
        with self._lock:
            room = 0 if self._closed else self._capacity - len(self._pending)
            lost = len(events) - room
            if lost > 0:
                self.dropped += lost
                self._unreported += lost
                events = events[:room]
            self._pending.extend(events)

    __call__ = extend

    def flush(self) -> None:
        """Nothing to pass on: the writing thread does that by itself."""

    def close(self) -> None:
        """Write what waits, close the file. Events that come later are dropped and counted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._closing.set()
        self._thread.join()
        self._append(self._take())
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error
        if self.error is not None:
            raise SgvizError(
                f"the recording {str(self.path)!r} is incomplete: {self.error}; "
                f"{self.written} events were written, {self.dropped} dropped"
            ) from self.error

    def __enter__(self) -> FileSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._flush_s):
            self._append(self._take())

    def _take(self) -> list[Event]:
        """What waits, closed by a `trace.dropped` if something was lost."""
        with self._lock:
            events, self._pending = self._pending, []
            if self._unreported and events:
                last = events[-1]
                body = TraceDropped(sink="file", count=self._unreported, total=self.dropped)
                events.append(Event(last.seq, last.t, last.component, last.iteration, body))
                self._unreported = 0
        return events

    def _append(self, events: list[Event]) -> None:
        if not events:
            return
        if self.error is None and self._write(encode_frames(events)):
            self.written += len(events)
            return
        if not self.dropped:
            logger.error(
                "the recording %r stops here: %s; its events are dropped", str(self.path), self.error
            )
        with self._lock:
            self.dropped += len(events)

    def _write(self, data: bytes | bytearray) -> bool:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.error = error
            return False
        return True
