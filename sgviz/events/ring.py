"""RingSink: the newest events of all components in the memory of one process.

What children send arrives encoded and stays so until somebody reads it: a run that nobody watches pays for the
bytes only. Imports: events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sgviz.events.schema import Event, TraceDropped

CHUNK = 256  # events that are put one by one and kept as one piece


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events on their way between processes.

    Attributes:
        count: how many. dropped: events lost before them, as their last one says (`trace.dropped`).
        events: the events, encoded.
    """

    count: int
    dropped: int
    events: msgspec.Raw


def pack(events: Sequence[Event], encode: Callable[[object], bytes]) -> EventBatch:
    """The batch of `events`; a `trace.dropped` stands last, if there is one."""
    last = events[-1].body
    dropped = last.count if isinstance(last, TraceDropped) else 0
    return EventBatch(len(events), dropped, msgspec.Raw(encode(events)))


class _Chunk:
    """Some events in the order of their arrival: encoded, or a list."""

    __slots__ = ("count", "events", "raw")

    def __init__(self, events: list[Event] | None, raw: msgspec.Raw | None, count: int) -> None:
        self.events = events
        self.raw = raw
        self.count = count


class RingSink:
    """The newest `capacity` events of all components of a process, safe to fill from several threads.

    Older events fall out and are counted in `dropped`. `subscribe` lets a file or a live view follow.
    """

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._capacity = capacity
        self._chunks: deque[_Chunk] = deque()
        self._held = 0  # events in the chunks
        self._gone = 0  # of the first chunk, events that fell out
        self._lock = threading.Lock()
        self._decoding = threading.Lock()  # an event that is read twice is the same object
        self._decode = msgspec.msgpack.Decoder(list[Event]).decode
        self._followers: list[Callable[[Sequence[Event]], None]] = []
        self.total = 0
        self.dropped_before = 0

    @property
    def dropped(self) -> int:
        """Events that are no longer (or never were) in the ring."""
        with self._lock:
            return self.total - self._held + self._gone + self.dropped_before

    def put(self, event: Event) -> None:
        """Take one event."""
        self.extend((event,))

    def extend(self, events: Sequence[Event]) -> None:
        """Take events in the order in which they came."""
        with self._lock:
            last = self._chunks[-1] if self._chunks else None
            if last is not None and last.raw is None and last.events is not None and last.count < CHUNK:
                last.events.extend(events)
                last.count += len(events)
            else:
                self._chunks.append(_Chunk(list(events), None, len(events)))
            for event in events:
                if isinstance(event.body, TraceDropped):
                    self.dropped_before += event.body.count
            followers = self._came(len(events))
        for follower in followers:
            follower(events)

    def extend_packed(self, batch: EventBatch) -> None:
        """Take events as they came from another process; they are decoded only if somebody reads or follows."""
        chunk = _Chunk(None, batch.events, batch.count)
        with self._lock:
            self._chunks.append(chunk)
            self.dropped_before += batch.dropped
            followers = self._came(batch.count)
        for follower in followers:
            follower(self._read(chunk))

    def _came(self, count: int) -> tuple[Callable[[Sequence[Event]], None], ...]:
        """Count, and let the oldest fall out."""
        self.total += count
        self._held += count
        self._gone = max(self._gone, self._held - self._capacity)
        while self._chunks and self._gone >= self._chunks[0].count:
            first = self._chunks.popleft().count
            self._gone -= first
            self._held -= first
        return tuple(self._followers)

    def flush(self) -> None:
        """Nothing to pass on."""

    def snapshot(self) -> list[Event]:
        """The events in the ring, in the order of time."""
        _, events = self.since(0)
        events.sort(key=lambda event: event.sort_key)
        return events

    def since(self, seen: int, most: int | None = None) -> tuple[int, list[Event]]:
        """Events in the order of arrival, from number `seen` on, at most `most`; and how many came before them.

        More came before than `seen` when some fell out of the ring meanwhile.
        """
        with self._lock:
            oldest = self.total - self._held + self._gone
            first = max(seen, oldest)
            end = self.total if most is None else min(self.total, first + most)
            if end <= first:
                return first, []
            at, chunks = self._between(first, end)
        out: list[Event] = []
        for chunk, count in chunks:
            out += self._read(chunk)[max(0, first - at) : min(count, end - at)]
            at += count
        return first, out

    def _between(self, first: int, end: int) -> tuple[int, list[tuple[_Chunk, int]]]:
        """The chunks that hold events `first` to `end`, each with its events now; and the number of their first one.

        Walked from the newer end: who follows has read all that is older.
        """
        found: list[tuple[_Chunk, int]] = []
        at = self.total
        for chunk in reversed(self._chunks):
            at -= chunk.count
            if at < end:
                found.append((chunk, chunk.count))
            if at <= first:
                break
        return at, found[::-1]

    def _read(self, chunk: _Chunk) -> list[Event]:
        if chunk.events is not None:
            return chunk.events
        with self._decoding:
            if chunk.events is None and chunk.raw is not None:
                # `raw` goes second: an open chunk is one without it from the start
                chunk.events = self._decode(chunk.raw)
                chunk.raw = msgspec.Raw()
            return chunk.events or []

    def subscribe(self, follower: Callable[[Sequence[Event]], None]) -> Callable[[], None]:
        """Call `follower` with every later batch of events; the returned function ends it."""
        with self._lock:
            self._followers.append(follower)

        def unsubscribe() -> None:
            with self._lock:
                if follower in self._followers:
                    self._followers.remove(follower)

        return unsubscribe
