"""Emitting: a `Tracer` per component stamps bodies and gives the events to a `Sink`.

The rule at the place of decision is one line: `if trace.on: trace.emit(...)`. A sink never blocks the
loop and never raises into it: it is bounded, counts what it drops, and says so by `trace.dropped`.

Imports: `events` only.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns, thread_time_ns
from typing import Protocol

from sgviz.events.clock import Clock, WallClock
from sgviz.events.schema import AnyBody, Event, TraceCost, TraceDropped

SAMPLE_MASK = 63  # one emit in 64 is timed
FLUSH_EVERY_NS = 20_000_000  # a live view is at most this far behind a busy loop
QUIET_MS = FLUSH_EVERY_NS // 1_000_000
TELL_COST_EVERY = 4096  # events between two statements of what they cost


class Sink(Protocol):
    def put(self, event: Event) -> None:
        """Take the event or drop it; never block, never raise."""
        ...

    def flush(self) -> None:
        """Pass on what is buffered. Called at the stops of a loop, before it blocks."""
        ...


class Tracer:
    """What a component emits through. `on` is read before every emit; switch it at any time.

    Args:
        component: name on every event: http, tokenizer_manager, scheduler, detokenizer.
        sink: where events go; None switches the tracer off. The emitting thread may put another before it.
        clock: nanoseconds; the wall clock unless a test or a simulation says otherwise.

    It measures itself: `cost_ns` is the time spent in `emit` (one in 64 timed, scaled up) and `flush`
    (all timed), on the process's own clock whatever `clock` is. Building the body is the caller's time.
    """

    __slots__ = ("_flushed_ns", "_seq", "_told", "clock", "component", "cost_ns", "iteration", "on", "sink")

    def __init__(self, component: str, sink: Sink | None, clock: Clock | None = None) -> None:
        self.component = component
        self.clock: Clock = clock or WallClock()
        self.iteration = 0
        self.on = sink is not None
        self.sink: Sink = sink or NullSink()
        self._seq = 0
        self.cost_ns = 0
        self._flushed_ns = 0
        self._told = 0  # the number of the event that last told the cost

    @property
    def seq(self) -> int:
        """Number of the newest event."""
        return self._seq

    def emit(self, body: AnyBody) -> None:
        """Stamp `body` and hand it to the sink. Call only when `on`."""
        self._seq += 1
        if self._seq & SAMPLE_MASK:
            self.sink.put(Event(self._seq, self.clock.now(), self.component, self.iteration, body))
        else:
            self._emit_timed(body)

    def flush(self) -> None:
        """Pass on what is buffered; call it before blocking."""
        start = thread_time_ns()
        self.sink.flush()
        self.cost_ns += thread_time_ns() - start

    def flush_if_due(self) -> None:
        """Pass on what has been waiting for long; cheap enough for every turn of a busy loop."""
        now = monotonic_ns()
        if now - self._flushed_ns >= FLUSH_EVERY_NS:
            self._flushed_ns = now
            self.flush()

    def _emit_timed(self, body: AnyBody) -> None:
        start = thread_time_ns()
        self.sink.put(Event(self._seq, self.clock.now(), self.component, self.iteration, body))
        self.cost_ns += (thread_time_ns() - start) * (SAMPLE_MASK + 1)
        if self._seq % TELL_COST_EVERY == 0:
            self.tell_cost()

    def tell_cost(self) -> None:
        """Emit what the events have cost so far, if any came since it was last told.

        A component does so when it becomes idle or ends.
        """
        if self._seq == self._told:
            return
        self._seq += 1
        self._told = self._seq
        body = TraceCost(events=self._seq, cost_ns=self.cost_ns)
        self.sink.put(Event(self._seq, self.clock.now(), self.component, self.iteration, body))


class NullSink:
    """Swallows everything; the sink of a tracer that is off."""

    __slots__ = ()

    def put(self, event: Event) -> None:
        pass

    def flush(self) -> None:
        pass


class BufferSink:
    """Collects events and passes them on in batches: the publisher of a child process.

    `send` gets an encoded batch and answers whether it was taken (a full socket takes nothing). A batch
    that is not taken is dropped, counted, and reported with the next one that is.
    """

    def __init__(self, send: Callable[[list[Event]], bool], batch: int = 256) -> None:
        self._send = send
        self._batch = batch
        self._buffer: list[Event] = []
        self._lost = 0
        self.dropped = 0

    def put(self, event: Event) -> None:
        self._buffer.append(event)
        if len(self._buffer) >= self._batch:
            self.flush()

    def flush(self) -> None:
        if not self._buffer:
            return
        out, self._buffer = self._buffer, []
        if self._lost:
            last = out[-1]
            body = TraceDropped(sink="publisher", count=self._lost, total=self.dropped)
            out.append(Event(last.seq, last.t, last.component, last.iteration, body))
        if self._send(out):
            self._lost = 0
        else:
            count = sum(1 for event in out if not isinstance(event.body, TraceDropped))
            self._lost += count
            self.dropped += count
