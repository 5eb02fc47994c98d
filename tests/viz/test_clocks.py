"""The clocks of the scrubber: a time or an iteration names the same moment as in a recording's tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.events.schema import Event, LoopIdle, RequestDispatched
from sgviz.viz.views import LiveViews, Wanted
from sgviz.viz.views.clocks import Clocks

DASHBOARD = ("dashboard",)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=512) as made:
        made.generate([f"{n}: why?" for n in range(12)], sampling_params={"max_new_tokens": 20})
        yield made


def test_an_iteration_is_the_moment_at_its_end(engine: Engine) -> None:
    rec = engine.recording().freeze()
    views = LiveViews(rec)
    views.refresh()
    newest = views.make(Wanted(what=DASHBOARD)).newest_iteration
    first = next(event.iteration for event in rec.stamped() if event.iteration)
    for iteration in range(first, newest + 1, 5):
        made, moment = (
            views.make(Wanted(what=DASHBOARD, at=iteration, clock="iteration")),
            rec.at(iteration=iteration),
        )
        assert made.seq == moment.count and made.iteration <= iteration
        assert made.dashboard is not None and made.dashboard.numbers.free == moment.free


def test_a_time_is_the_moment_after_all_that_came_until_then(engine: Engine) -> None:
    rec = engine.recording().freeze()
    views = LiveViews(rec)
    views.refresh()
    whole = views.make(Wanted(what=DASHBOARD))
    assert whole.oldest_ms == 0.0
    for step in range(1, 20):
        ms = whole.newest_ms * step / 20
        assert views.make(Wanted(what=DASHBOARD, at=ms, clock="ms")).seq == rec.at(time=ms).count


def test_the_ends_of_the_clocks_are_the_ends_of_the_run(engine: Engine) -> None:
    views = LiveViews(engine.recording())
    views.refresh()
    whole = views.make(Wanted(what=DASHBOARD))
    for clock, value in (
        ("ms", whole.newest_ms),
        ("iteration", whole.newest_iteration),
        ("event", whole.newest),
    ):
        assert views.make(Wanted(what=DASHBOARD, at=value, clock=clock)).seq == whole.seq  # type: ignore[arg-type]


@pytest.mark.parametrize(("clock", "unit"), [("ms", "ms"), ("iteration", "iteration")])
def test_where_the_clock_never_was_is_refused(engine: Engine, clock: str, unit: str) -> None:
    views = LiveViews(engine.recording())
    views.refresh()
    with pytest.raises(BadRequest, match=rf"{unit} 1e\+09 is not between .* what is remembered"):
        views.make(Wanted(what=DASHBOARD, at=1e9, clock=clock))  # type: ignore[arg-type]


STEPS = st.lists(st.tuples(st.integers(-3, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=300)


@given(steps=STEPS, forgotten=st.floats(0, 1), probe=st.floats(0, 1))
def test_any_place_is_found_as_by_a_walk_from_the_beginning(
    steps: list[tuple[int, int, bool]], forgotten: float, probe: float
) -> None:
    """Events come a little out of the order of time, and some belong to no iteration; old ones are forgotten."""
    events, t, iteration = [], 1000, 0
    for seq, (later, turns, elsewhere) in enumerate(steps, 1):
        t, iteration = max(1, t + later), iteration + turns
        body = (
            RequestDispatched(rid="a") if elsewhere else LoopIdle(kv_free=0, kv_evictable=0, kv_protected=0)
        )
        events.append(Event(seq, t, "scheduler", 0 if elsewhere else iteration, body))
    clocks = Clocks()
    for count, event in enumerate(events, 1):
        clocks.apply(event, count)

    def since(count: int, most: int) -> tuple[int, Sequence[Event]]:
        return count, events[count : count + most]

    first = clocks.forget(round(forgotten * len(events)))
    low, high = first.iteration, clocks.newest.iteration
    wanted = low + round(probe * (high - low))
    expected = max(n for n in range(len(events) + 1) if all(e.iteration <= wanted for e in events[:n]))
    assert clocks.count_at("iteration", wanted, 0, since) == max(first.count, expected)
    t_wanted = first.t + round(probe * (clocks.newest.t - first.t))
    until = max(n for n in range(len(events) + 1) if all(e.t <= t_wanted for e in events[:n]))
    assert clocks.count_at("ms", t_wanted / 1e6, 0, since) == max(first.count, until)
