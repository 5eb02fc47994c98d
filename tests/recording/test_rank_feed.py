"""Each scheduler of several followed as events come: what the split of a whole recording gives, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sgviz.engine import Engine
from sgviz.errors import BadRequest, NotFound
from sgviz.events import RingSink
from sgviz.events.schema import (
    DpChose,
    DpRankChanged,
    Event,
    RequestTokenized,
)
from sgviz.recording import Recording, rank_feed
from sgviz.recording.rank_feed import RankFeed
from sgviz.recording.rank_split import NOBODY, rank_of
from sgviz.viz.views import LiveViews, RankedViews, Wanted

PROMPTS = [f"request number {n} " * (1 + n % 5) for n in range(12)]


@pytest.fixture(scope="module")
def rec() -> Iterator[Recording]:
    """Two ranks; samples of one prompt on both, and a request that no rank gets."""
    with Engine(model="tiny-llama", device="mock", dp_size=2, mock_step_ms=1.0) as engine:
        engine.generate(PROMPTS, {"max_new_tokens": 12})
        engine.generate("x", {"n": 4, "max_new_tokens": 3}, rid="family")
        with pytest.raises(BadRequest):
            engine.generate("y", {"max_new_tokens": 3}, routed_dp_rank=2, rid="nobodys")
        yield engine.recording().freeze()


def live(ring: RingSink, rec: Recording) -> Recording:
    return Recording.live(ring.snapshot, rec.header, total=lambda: ring.total, since=ring.since)


def arriving(events: Sequence[Event], delays: Sequence[int]) -> list[Event]:
    """In the order in which they come if what each process says is on its way for so long (ms)."""
    processes = ("data_parallel_controller", "detokenizer", "scheduler-0", "scheduler-1")
    late = {name: delay * 1_000_000 for name, delay in zip(processes, delays, strict=True)}
    return sorted(events, key=lambda e: (e.t + late.get(e.component, 0), e.component, e.seq))


def bodies(events: Sequence[Event]) -> Counter[tuple[int, str, str]]:
    return Counter((event.t, event.component, repr(event.body)) for event in events)


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    delays=st.lists(st.integers(0, 400), min_size=4, max_size=4),
    pieces=st.lists(st.integers(7, 200), min_size=1, max_size=9),
)
def test_a_rank_s_stream_is_that_of_the_whole_however_late_its_parts_come(
    rec: Recording, delays: list[int], pieces: list[int]
) -> None:
    ring, events, at = RingSink(), arriving(rec.stamped(), delays), 0
    whole = live(ring, rec)
    feed = RankFeed(whole, (0, 1))
    for number in range(len(events)):
        if at >= len(events):
            break
        size = pieces[number % len(pieces)]
        ring.extend(events[at : at + size])
        at += size
        assert feed.advance() == min(at, len(events))
    for rank in (0, 1):
        followed, mine = feed.recording(rank), rec.rank(rank)
        assert bodies(followed.stamped()) == bodies(mine.stamped())
        assert set(followed.rids) == set(mine.rids)
        assert followed.at().free == mine.at().free and not followed.missing
        assert followed.check() == [] and followed.audit().balanced
        assert [followed.explain(rid).done for rid in mine.rids] == [
            mine.explain(rid).done for rid in mine.rids
        ]


def test_what_waits_holds_nobody_up(rec: Recording) -> None:
    """A request that has no rank yet is in none; all else is where it belongs at once."""
    ring = RingSink()
    feed = RankFeed(live(ring, rec), (0, 1))
    begin = RequestTokenized(rid="slow", prompt_tokens=3)
    ring.extend([Event(1, 10, "tokenizer_manager", 0, begin)])
    other = next(event for event in rec.stamped() if rank_of(event.component) == 1)
    ring.extend([other])
    assert feed.total(0) == 0 and feed.total(1) == 1
    chosen = DpChose(rid="slow", rank=0, policy="x", candidates=(), prompt_tokens=3, received_ns=20)
    ring.extend([Event(1, 30, "data_parallel_controller", 0, chosen)])
    assert [event.kind for event in feed.since(0, 0, 9)[1]] == ["request.tokenized", "dp.chose"]
    assert feed.total(1) == 1
    assert feed.count_at(0, 2) == 0 and feed.count_at(0, 3) == 2 and feed.place_of(0, 1) == 3


def test_each_rank_with_a_sample_knows_its_parent(rec: Recording) -> None:
    ring = RingSink()
    ring.extend(list(rec.stamped()))
    feed = RankFeed(live(ring, rec), (0, 1))
    for rank in (0, 1):
        family = feed.recording(rank)._requests()["family"]
        kinds = [e.kind for e in feed.snapshot(rank) if getattr(e.body, "rid", "") == "family"]
        assert "request.converted" in kinds[:2] and len(set(kinds[:2])) == 2
        assert family.children and all(rid.startswith("family_") for rid in family.children)


def test_what_no_rank_got_is_in_none(rec: Recording) -> None:
    ring = RingSink()
    ring.extend(list(rec.stamped()))
    feed = RankFeed(live(ring, rec), (0, 1))
    assert feed.total(NOBODY) > 0
    for rank in (0, 1):
        assert "nobodys" not in feed.recording(rank).rids


def test_memory_is_that_of_the_ring_and_of_those_that_live(
    rec: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_feed, "MAX_LIVES", 16)
    events = list(rec.stamped())
    ring = RingSink(capacity=256)
    feed = RankFeed(live(ring, rec), (0, 1))
    for event in events:
        ring.put(event)
        feed.advance()
        first, _ = ring.since(0, 0)
        for rank in (0, 1):
            lane = feed._lanes[rank]
            kept = sum(place > first for place in lane.places)
            assert len(lane.events) == len(lane.places) <= 2 * kept + 8
    assert len(feed._split._known) <= 16
    assert feed.lost == 0
    for rank in (0, 1):
        assert feed.total(rank) == len(rec.rank(rank).stamped())
        first, some = feed.since(rank, 0, 5)
        assert first > 0 and some[-1] == feed.since(rank, first + len(some) - 1, 1)[1][0]


def test_what_the_ring_lost_is_told(rec: Recording) -> None:
    """Nobody looked for a while: no rank says that it knows all."""
    ring = RingSink(capacity=128)
    views = RankedViews(live(ring, rec))
    events = list(rec.stamped())
    ring.extend(events[:200])
    views.refresh(0)
    ring.extend(events[200:])
    views.refresh(1)
    gone = len(events) - 128
    for rank in (0, 1):
        numbers = views.make(Wanted(rank=rank)).dashboard.numbers  # type: ignore[union-attr]
        assert numbers.dropped >= gone - 200
    with pytest.raises(BadRequest, match=rf"seq 3 is not between \d+ and {len(events)}"):
        views.moment(3, 0)


def test_views_of_a_rank_that_was_lost_say_so(rec: Recording) -> None:
    events, ring = list(rec.stamped()), RingSink()
    views = RankedViews(live(ring, rec))
    ring.extend(events)
    at, seq = events[-1].t, max(e.seq for e in events if e.component == "data_parallel_controller")
    for number, (active, fault) in enumerate(((False, "rank 1 was lost: killed"), (True, "")), 1):
        change = DpRankChanged(rank=1, active=active, why="killed")
        ring.extend([Event(seq + number, at + number, "data_parallel_controller", 0, change)])
        views.refresh(1)
        assert [views.make(Wanted(rank=rank)).fault for rank in (0, 1)] == ["", fault]


def test_views_of_a_file_and_of_one_scheduler(rec: Recording) -> None:
    views = RankedViews(rec)
    assert views.ranks == (0, 1)
    for rank in (0, 1):
        made = views.make(Wanted(rank=rank))
        alone = LiveViews(rec.rank(rank))
        alone.refresh()
        assert made.dashboard == alone.make(Wanted()).dashboard
        assert (made.rank, made.ranks) == (rank, (0, 1))
        one = RankedViews(rec.rank(rank))
        assert one.ranks == () and one.make(Wanted()).dashboard == made.dashboard
    for views in (RankedViews(rec), RankedViews(rec.rank(1))):
        with pytest.raises(BadRequest, match="rank is 7"):
            views.make(Wanted(rank=7))


def test_a_frozen_moment_has_what_waited_for_its_rank(rec: Recording) -> None:
    """Else all that came behind a request on its way to the controller would be in no rank."""
    events = list(rec.stamped())
    at = next(n for n, e in enumerate(events) if isinstance(e.body, RequestTokenized)) + 1
    chose = next(n for n, e in enumerate(events) if isinstance(e.body, DpChose))
    assert at <= chose
    later = [event for event in events[chose:] if rank_of(event.component) == 1][:5]
    ring = RingSink()
    ring.extend([*events[:at], *later])
    whole = live(ring, rec)
    frozen = whole.freeze()
    assert [e.kind for e in frozen.rank(1).stamped() if e.component == "scheduler"][-5:] == [
        e.kind for e in later
    ]
    ring.extend(events[at:])
    assert len(whole.rank(1).stamped()) > len(frozen.rank(1).stamped())
    again = [e.kind for e in frozen.rank(1).stamped() if e.component == "scheduler"][-5:]
    assert again == [e.kind for e in later] and not frozen.missing


def test_a_frozen_moment_is_one_in_all_ranks(rec: Recording) -> None:
    """Events come while it is made: none is in a rank and not in the whole."""
    events, looks = list(rec.stamped()), [300]

    def snapshot() -> list[Event]:
        looks[0] += 1
        return events[: looks[0]]

    whole = Recording.live(snapshot, rec.header, total=lambda: looks[0])
    for rank in (0, 1):
        assert whole.rank(rank).rids
    frozen = whole.freeze()
    assert len(frozen.stamped()) < len(events)
    told = bodies(frozen.stamped())
    for rank in (0, 1):
        mine = [event for event in frozen.rank(rank).stamped() if event.component != "scheduler"]
        assert not [event for event in mine if hasattr(event.body, "rid") and (
            event.t, event.component, repr(event.body)) not in told]  # fmt: skip
        theirs = [e for e in frozen.stamped() if rank_of(e.component) == rank]
        own = [e for e in frozen.rank(rank).stamped() if e.component == "scheduler"]
        assert [(e.t, e.kind) for e in own] == [(e.t, e.kind) for e in theirs]


def test_a_part_of_a_live_recording_has_siblings_of_its_own(rec: Recording) -> None:
    ring = RingSink()
    ring.extend(list(rec.stamped()))
    part = live(ring, rec).rank(1)
    other = part.sibling()
    assert other is not part and other.rank_number == 1 and other.ranks == (1,)
    assert bodies(other.stamped()) == bodies(part.stamped())
    assert other.source == part.source and other.t0 == part.t0
    with pytest.raises(NotFound, match="no rank 0"):
        other.rank(0)


def test_the_rank_of_a_request(rec: Recording) -> None:
    for rank in (0, 1):
        for rid in set(rec.rank(rank).rids) - {"family"}:
            assert rec.rank_with(rid) == rank
            assert rec.rank(rank).rank_with(rid) == 0  # there it is the only one
    assert rec.rank_with("nobodys") is None
    with pytest.raises(NotFound):
        rec.rank_with("who")
