"""The lanes of host and device: the account's own spans and sums, live and from a file, now and at any moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.events import Event, RingSink
from sgviz.recording import Recording
from sgviz.recording.overlap_account import STAGES, WAIT, overlap_account
from sgviz.viz.views import LiveViews, OverlapView, Wanted
from sgviz.viz.views.overlap import MOST_EVENTS, MOST_SPANS

WHAT = ("overlap",)
MODES = {"extend", "decode", "mixed"}
ROUNDED = 1e-3  # ms


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = {"max_total_tokens": 512, "chunked_prefill_size": 64, "event_loop": "overlap"}
    with Engine("tiny-llama", device="mock", mock_step_ms=2, **settings) as made:
        prompts = [("You are a patient teacher. " * (n % 3)) + f"{n}: why?" for n in range(24)]
        made.generate(prompts, sampling_params={"max_new_tokens": 40})
        yield made


def lanes(views: LiveViews, **wanted: object) -> OverlapView:
    views.refresh()
    made = views.make(Wanted(what=WHAT, **wanted)).overlap  # type: ignore[arg-type]
    assert made is not None
    return made


def test_what_is_drawn_is_the_account_of_the_stretch(engine: Engine) -> None:
    rec = engine.recording().freeze()
    view = lanes(LiveViews(rec), seconds=0.05)
    assert view.end_ms - view.begin_ms == pytest.approx(50.0) and not view.missing and not view.cut
    stretch = (rec.t0 + round(view.begin_ms * 1e6), rec.t0 + round(view.end_ms * 1e6))
    account = overlap_account(rec.stamped(), stretch=stretch)
    said = view.numbers
    assert said.hidden_s == pytest.approx(account.host_hidden_s)
    assert said.exposed_s == pytest.approx(account.host_exposed_s)
    assert (said.busy_s, said.idle_s) == pytest.approx((account.device_busy_s, account.device_idle_s))
    assert said.launches == account.launches > 5


def test_lanes_add_up_to_the_numbers_beside_them(engine: Engine) -> None:
    view = lanes(LiveViews(engine.recording().freeze()), seconds=0.1)
    assert view.column_ms == 0.0

    def drawn(spans: Sequence[object], *names: str) -> float:
        return sum(each.length_ms for each in spans if each.name in names) / 1000  # type: ignore[attr-defined]

    said, slack = view.numbers, 1e-6 * len(view.host) + 1e-6
    assert drawn(view.kinds, "hidden") == pytest.approx(said.hidden_s, abs=slack)
    assert drawn(view.kinds, "exposed") == pytest.approx(said.exposed_s, abs=slack)
    assert drawn(view.device, "idle") == pytest.approx(said.idle_s, abs=slack)
    assert drawn(view.device, *MODES) == pytest.approx(said.busy_s, abs=slack)
    assert drawn(view.host, WAIT) == pytest.approx(said.wait_s, abs=slack)
    assert {each.name for each in view.host} <= {*STAGES, WAIT}
    for lane in (view.host, view.kinds, view.device):
        ordered = sorted(lane, key=lambda each: each.start_ms)
        assert all(a.start_ms + a.length_ms <= b.start_ms + ROUNDED for a, b in pairwise(ordered))
        assert all(each.start_ms >= view.begin_ms - ROUNDED for each in lane)
        assert all(each.start_ms + each.length_ms <= view.end_ms + ROUNDED for each in lane)
    numbers = [number for _, number in view.turns]
    assert numbers == sorted(numbers) and len(numbers) > 5


def test_live_and_from_a_file_look_the_same(engine: Engine) -> None:
    """A file is in the order of time, a live run in that of arrival: the scheduler's own order is the same."""
    live, file = LiveViews(engine.recording()), LiveViews(engine.recording().freeze())
    one, other = lanes(live, seconds=0.1), lanes(file, seconds=0.1)
    assert (one.host, one.kinds, one.device, one.turns) == (
        other.host,
        other.kinds,
        other.device,
        other.turns,
    )


def test_a_moment_of_the_past_is_as_it_was_then(engine: Engine) -> None:
    ring = engine.pipeline.ring
    views = LiveViews(engine.recording())
    views.refresh()
    for count in range(200, views.follower.count, 571):
        then = lanes(views, seconds=0.03, at=count)
        first = sorted(ring.since(0, count)[1], key=lambda event: event.sort_key)
        assert then == lanes(LiveViews(Recording(first)), seconds=0.03)


def test_what_fell_out_of_memory_is_not_missed_in_the_lanes(engine: Engine) -> None:
    """Only the newest events are there: who was being served before them still counts as work to do."""
    events = engine.pipeline.ring.snapshot()
    halfway = events[: len(events) * 2 // 3]
    everything, rest = (
        lanes(followed(halfway, 100_000), seconds=0.02),
        lanes(followed(halfway, 600), seconds=0.02),
    )
    assert everything.numbers.idle_s > 0
    assert (rest.device, rest.kinds) == (everything.device, everything.kinds)


def followed(events: Sequence[Event], capacity: int) -> LiveViews:
    """Views that saw every event, of a ring that remembers only `capacity` of them."""
    ring = RingSink(capacity=capacity)
    rec = Recording.live(
        ring.snapshot, total=lambda: ring.total, dropped=lambda: ring.dropped, since=ring.since
    )
    views = LiveViews(rec)
    for start in range(0, len(events), 300):
        ring.extend(events[start : start + 300])
        views.refresh()
    return views


def test_many_spans_are_drawn_as_columns() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=0, max_total_tokens=4096) as engine:
        engine.generate(["a", "b"], sampling_params={"max_new_tokens": 900, "ignore_eos": True})
        view = lanes(LiveViews(engine.recording().freeze()), seconds=60.0)
    assert view.column_ms > 0
    assert max(len(view.host), len(view.kinds), len(view.device)) <= MOST_SPANS
    assert view.column_ms == pytest.approx((view.end_ms - view.begin_ms) / MOST_SPANS)
    assert {each.name for each in view.device} & MODES and {each.name for each in view.host} & set(STAGES)
    assert view.numbers.launches > 800


def test_a_stretch_with_too_many_events_is_shorter_and_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_EVENTS > 10_000
    monkeypatch.setattr("sgviz.viz.views.overlap.MOST_EVENTS", 500)
    monkeypatch.setattr("sgviz.viz.views.overlap.PIECE", 250)
    view = lanes(LiveViews(engine.recording()), seconds=60.0)
    assert view.cut and 0 < view.end_ms - view.begin_ms < 60_000 and view.numbers.launches > 5


def test_before_the_first_event_there_is_nothing(engine: Engine) -> None:
    view = lanes(LiveViews(engine.recording()), at=0)
    assert not view.host and not view.device and view.numbers.launches == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0])
def test_a_stretch_that_cannot_be_is_refused(engine: Engine, seconds: float) -> None:
    from sgviz.viz import OverlapLanes

    with pytest.raises(BadRequest, match="cannot be looked at"):
        OverlapLanes(engine.recording(), seconds=seconds)
