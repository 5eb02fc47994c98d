"""Tracer and sinks: stamps, bounds, and losses that are always counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.events import BufferSink, NullSink, RingSink, Tracer, VirtualClock, WallClock
from sgviz.events.schema import Event, RequestDispatched, TraceDropped

BODY = RequestDispatched(rid="r")


def event(seq: int, t: int = 0, component: str = "c") -> Event:
    return Event(seq, t or seq, component, 0, BODY)


def test_tracer_stamps_number_time_component_and_iteration() -> None:
    ring, clock = RingSink(), VirtualClock(100)
    tracer = Tracer("scheduler", ring, clock)
    tracer.emit(BODY)
    clock.advance(5)
    tracer.iteration = 9
    tracer.emit(BODY)
    assert ring.snapshot() == [Event(1, 100, "scheduler", 0, BODY), Event(2, 105, "scheduler", 9, BODY)]


def test_tracer_without_a_sink_is_off() -> None:
    tracer = Tracer("http", None)
    assert not tracer.on
    tracer.emit(BODY)
    tracer.flush()
    NullSink().put(event(1))


def test_wall_clock_never_falls_and_anchors_lie_between_readings() -> None:
    clock = WallClock()
    before = clock.now()
    _, monotonic = WallClock.anchor()
    assert before <= monotonic <= clock.now()


def test_virtual_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        VirtualClock().advance(-1)


def test_ring_keeps_the_newest_and_counts_the_rest() -> None:
    ring = RingSink(capacity=3)
    for seq in range(1, 8):
        ring.put(event(seq))
    assert [e.seq for e in ring.snapshot()] == [5, 6, 7]
    assert ring.dropped == 4 and ring.total == 7


def test_ring_counts_what_was_lost_on_the_way_to_it() -> None:
    ring = RingSink()
    ring.put(Event(1, 1, "c", 0, TraceDropped(sink="publisher", count=5, total=5)))
    assert ring.dropped == 5


def test_ring_sorts_by_time_whatever_the_order_of_arrival() -> None:
    ring = RingSink()
    ring.extend([event(1, 30, "b"), event(2, 40, "b")])
    ring.extend([event(1, 10, "a"), event(2, 30, "a")])
    assert [(e.t, e.component) for e in ring.snapshot()] == [(10, "a"), (30, "a"), (30, "b"), (40, "b")]


def test_followers_see_later_events_until_they_leave() -> None:
    ring, seen = RingSink(), list[int]()

    def follow(events: Sequence[Event]) -> None:
        seen.extend(e.seq for e in events)

    ring.put(event(1))
    leave = ring.subscribe(follow)
    ring.extend([event(2), event(3)])
    leave()
    leave()
    ring.put(event(4))
    assert seen == [2, 3]


def test_ring_filled_by_threads_loses_nothing() -> None:
    ring = RingSink()
    tracers = [Tracer(f"c{number}", ring) for number in range(4)]
    threads = [threading.Thread(target=lambda t=t: [t.emit(BODY) for _ in range(300)]) for t in tracers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ring.snapshot()) == 1200 == ring.total


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 5))
def test_buffer_sink_accounts_for_every_event(answers: list[bool], batch: int) -> None:
    """Taken or counted: sent events plus reported losses plus the losses still to report are all."""
    script = iter(answers)
    taken: list[Event] = []

    def send(events: list[Event]) -> bool:
        ok = next(script, True)
        if ok:
            taken.extend(events)
        return ok

    sink = BufferSink(send, batch=batch)
    for seq in range(1, 41):
        sink.put(event(seq))
    sink.flush()
    told = sum(e.body.count for e in taken if isinstance(e.body, TraceDropped))
    own = [e.seq for e in taken if not isinstance(e.body, TraceDropped)]
    assert own == sorted(own) and len(own) + sink.dropped == 40
    assert told + sink._lost == sink.dropped  # what is not told yet comes with the next batch taken


def test_buffer_sink_sends_nothing_when_empty() -> None:
    calls: list[int] = []
    sink = BufferSink(lambda events: calls.append(len(events)) is None)
    sink.flush()
    assert calls == []
