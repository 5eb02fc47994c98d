"""Stages lie end to end, whatever was stamped."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sgviz.events import TimeStats, end_to_end_ns, stages
from sgviz.events.time_stats import STAGES

NAMES = ["created", *(stamp for stamp, _ in STAGES)]


@given(st.lists(st.one_of(st.just(0), st.integers(1, 10**12)), min_size=len(NAMES), max_size=len(NAMES)))
def test_stages_are_contiguous_and_add_up_for_any_stamps(stamps: list[int]) -> None:
    stats = TimeStats(**dict(zip(NAMES, stamps)))
    found = stages(stats)
    assert all(stage.duration_ns >= 0 for stage in found)
    for before, after in itertools.pairwise(found):
        assert before.start_ns + before.duration_ns == after.start_ns
    assert sum(stage.duration_ns for stage in found) == end_to_end_ns(stats)
    if found:
        first = next(stamp for stamp in stamps if stamp)
        assert (
            found[0].start_ns == first and end_to_end_ns(stats) == max(stamps[: last_reached(stamps)]) - first
        )


def last_reached(stamps: list[int]) -> int:
    return 1 + max(index for index, stamp in enumerate(stamps) if stamp)


def test_a_complete_life_has_every_stage_under_its_name() -> None:
    stats = TimeStats(**{name: 100 + 10 * number for number, name in enumerate(NAMES)})
    assert [stage.name for stage in stages(stats)] == [name for _, name in STAGES]
    assert all(stage.duration_ns == 10 for stage in stages(stats))


def test_a_skipped_stamp_gives_its_time_to_the_next_stage() -> None:
    stats = TimeStats(created=10, tokenize_finish=30)
    assert [(stage.name, stage.start_ns, stage.duration_ns) for stage in stages(stats)] == [
        ("tokenize", 10, 20)
    ]


def test_without_arrival_the_first_stamp_begins() -> None:
    stats = TimeStats(wait_queue_entry=50, forward_entry=70)
    assert [(stage.name, stage.start_ns, stage.duration_ns) for stage in stages(stats)] == [
        ("prefill_waiting", 50, 20)
    ]


def test_nothing_stamped_nothing_spent() -> None:
    assert stages(TimeStats()) == [] and end_to_end_ns(TimeStats()) == 0
