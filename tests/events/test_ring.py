"""The ring against a plain list, however events come and are read."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sgviz.events import RingSink
from sgviz.events.ring import pack
from sgviz.events.schema import Event, RequestDispatched, TraceDropped

ENCODE = msgspec.msgpack.Encoder().encode
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "extend", "packed", "look", "since"]), st.integers(1, 9), st.integers(0, 60)),
    max_size=40,
)  # fmt: skip


def event(seq: int) -> Event:
    return Event(seq, seq, "c", 0, RequestDispatched(rid=f"r{seq}"))


def packed(ring: RingSink, events: list[Event]) -> None:
    ring.extend_packed(msgspec.msgpack.decode(ENCODE(pack(events, ENCODE)), type=type(pack(events, ENCODE))))


@given(STEPS, st.integers(1, 40))
def test_it_holds_the_newest_whatever_came_packed(steps: list[tuple[str, int, int]], capacity: int) -> None:
    ring, came = RingSink(capacity), list[Event]()
    for what, size, number in steps:
        new = [event(len(came) + 1 + i) for i in range(1 if what == "put" else size)]
        if what == "put":
            ring.put(new[0])
        elif what == "extend":
            ring.extend(new)
        elif what == "packed":
            packed(ring, new)
        elif what == "look":
            assert ring.snapshot() == came[-capacity:]
        else:
            first, found = ring.since(number, size)
            kept = max(number, len(came) - capacity)
            assert (first, found) == (kept, came[kept : kept + size])
        if what in ("put", "extend", "packed"):
            came += new
        assert ring.total == len(came) and ring.dropped == max(0, len(came) - capacity)
    assert ring.snapshot() == came[-capacity:]


def test_what_is_read_twice_is_the_same_object() -> None:
    ring = RingSink()
    packed(ring, [event(1), event(2)])
    ring.put(event(3))
    once, again = ring.snapshot(), ring.since(0)[1]
    assert all(one is other for one, other in zip(once, again, strict=True))


def test_followers_get_what_comes_packed_and_losses_are_counted() -> None:
    ring, seen = RingSink(), list[Event]()
    ring.subscribe(seen.extend)
    lost = Event(3, 3, "c", 0, TraceDropped(sink="publisher", count=5, total=5))
    packed(ring, [event(1), event(2), lost])
    assert seen == [event(1), event(2), lost] and ring.dropped == 5 and ring.total == 3
