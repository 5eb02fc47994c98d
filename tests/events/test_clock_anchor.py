"""The anchor ties the monotonic clock to the calendar, however busy the machine is."""

from __future__ import annotations

import itertools

import pytest

from sgviz.events import clock

YEAR, MS = 10**18, 10**6


@pytest.mark.parametrize("slow", list(itertools.combinations(range(clock.ANCHOR_READINGS), 4)))
def test_a_thread_that_is_put_off_between_two_clocks_spoils_no_anchor(
    slow: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All readings but one are interrupted for 9 ms, before or after the calendar is read."""
    now, monotonics, calendars = 0, itertools.count(), itertools.count()

    def monotonic() -> int:
        nonlocal now
        number, second = divmod(next(monotonics), 2)
        now += 9 * MS if number in slow and second and number % 2 else 100
        return now

    def calendar() -> int:
        nonlocal now
        number = next(calendars)
        now += 9 * MS if number in slow and not number % 2 else 100
        return YEAR + now

    monkeypatch.setattr(clock.time, "monotonic_ns", monotonic)
    monkeypatch.setattr(clock.time, "time_ns", calendar)
    unix_ns, monotonic_ns = clock.WallClock.anchor()
    assert abs(unix_ns - monotonic_ns - YEAR) <= 1000
