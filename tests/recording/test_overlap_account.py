"""The overlap account on schedules made by hand, where every number is known exactly, and its identities on any."""

from __future__ import annotations

import pytest
from hand_loop import MS, Hand, by_stage, ms, normal_loop, overlap_loop
from hypothesis import given
from hypothesis import strategies as st

from sgviz.errors import BadRequest
from sgviz.events.schema import (
    Event,
    LoopIdle,
    RequestAborted,
)
from sgviz.recording.intervals import both, normal, total, without
from sgviz.recording.overlap_account import overlap_account


def test_the_normal_loop_hides_nothing() -> None:
    account = overlap_account(normal_loop().events, until="last_launch")
    assert account.until == "last launch" and ms(account.window_s) == 18 and account.launches == 1
    assert ms(account.device_busy_s) == 10
    assert account.host_hidden_s == 0 and account.hidden_share == 0
    # 0 to 2 and 13.5 to 18 are work; before 0.25 nobody had taken the request
    assert ms(account.host_busy_s) == 6.5 and ms(account.host_exposed_s) == 6.25
    # the launch began 1 ms late and the result was seen half a millisecond late
    assert ms(account.host_wait_s) == 11.5 and ms(account.handoff_s) == 1.5
    assert ms(account.device_idle_s) == 7.75 and ms(account.runnable_s) == 17.75
    assert account.device_idle_share == pytest.approx(7.75 / 17.75)


def test_the_stages_of_the_normal_loop_are_known_exactly() -> None:
    stages = by_stage(overlap_account(normal_loop().events, until="last_launch"))
    busy = {name: ms(row.busy_s) for name, row in stages.items()}
    assert busy == {"receive": 0.5, "plan": 1.5, "launch": 2, "process": 2, "loop": 0.5, "extend": 10}
    assert ms(stages["receive"].exposed_s) == 0.25
    assert all(row.hidden_s == 0 for row in stages.values())
    assert {row.component for row in stages.values() if row.stage == "extend"} == {"device"}


def test_the_overlap_loop_hides_what_runs_behind_a_forward() -> None:
    account = overlap_account(overlap_loop().events, until="last_launch")
    # to 18: turn and launch of bid 1 (2 ms) stand alone, 3 to 5 and 13.5 to 18 lie behind forwards
    assert ms(account.window_s) == 18 and ms(account.host_busy_s) == 9.5
    assert ms(account.host_hidden_s) == 6.5 and ms(account.host_exposed_s) == 2.75
    assert ms(account.device_busy_s) == 15 and ms(account.device_idle_s) == 2.75
    assert account.handoff_s == 0
    stages = by_stage(account)
    assert ms(stages["process"].hidden_s) == 2 and ms(stages["stream"].hidden_s) == 0.5
    assert ms(stages["plan"].hidden_s) == 2 and ms(stages["plan"].exposed_s) == 0.5


def test_the_window_ends_with_the_last_arrival_unless_all_came_at_once() -> None:
    hand = normal_loop()
    assert overlap_account(hand.events).until == "last launch"
    late = normal_loop()
    late.enter(33, "b", taken=32.5)
    late.plan(34, 3)
    late.launch(35, 3, turn=32.5)
    account = overlap_account(late.events)
    assert account.until == "last arrival" and ms(account.window_s) == 32.5
    # idle from 32, nothing to do from 31.5: neither counts against anybody
    assert ms(account.device_busy_s) == 20 and ms(account.runnable_s) == 31.25
    assert ms(account.device_idle_s) == 11.25
    with pytest.raises(BadRequest, match="last_launch"):
        overlap_account(late.events, until="never")  # type: ignore[arg-type]


def test_waiting_for_a_message_is_no_host_time() -> None:
    hand = normal_loop()
    hand.enter(1000.5, "b", taken=1000.25)
    hand.plan(1001, 3)
    hand.launch(1002, 3, turn=1000)
    account = overlap_account(hand.events, until="last_launch")
    assert ms(account.window_s) == 1002
    # the 968 ms after loop.idle are neither work nor exposed nor device idle
    assert ms(account.host_busy_s) == 2 + 4.5 + 2.5 + 2
    assert ms(account.host_exposed_s) == 6.25 + 2 + 1.75
    assert ms(account.device_idle_s) == 7.75 + 1 + 0.5 + 2 + 1.75


def test_an_aborted_request_is_runnable_until_its_abort() -> None:
    hand = Hand()
    hand.enter(0, "a", taken=0)
    hand.enter(0, "b", taken=0)
    hand.plan(1, 1)
    hand.launch(2, 1, turn=0)
    hand.finish(5, 1, (2, 4), wait=2)
    hand.process(6, 1, "a")
    hand.at(8, RequestAborted(rid="b", where="waiting", why="client left"))
    hand.enter(20, "c", taken=20)
    hand.plan(20, 2)
    hand.launch(20, 2, turn=20)
    account = overlap_account(hand.events, until="last_launch")
    assert ms(account.runnable_s) == 8 and ms(account.device_idle_s) == 6


def test_lost_events_and_other_components_are_told_apart() -> None:
    hand = normal_loop()
    stranger = Event(7, 5 * MS, "detokenizer", 0, LoopIdle(kv_free=0, kv_evictable=0, kv_protected=0))
    whole = overlap_account([*hand.events[:3], stranger, *hand.events[3:]], until="last_launch")
    assert whole == overlap_account(hand.events, until="last_launch") and whole.missing == 0
    assert overlap_account([*hand.events[:4], *hand.events[5:]]).missing == 1


def test_nothing_launched_is_an_account_of_nothing() -> None:
    account = overlap_account([])
    assert account.window_s == 0 and account.launches == 0 and account.device_idle_share == 0
    assert set(account.row()) >= {"host_hidden_s", "host_exposed_s", "device_idle_s", "device_busy_s"}


# ---------------------------------------------------------------- any schedule


@st.composite
def schedules(draw: st.DrawFn) -> list[Event]:
    """Turns of a loop that plans, launches, waits and processes, with forwards of any length."""
    hand, now, device, steps = Hand(), 0.0, 0.0, draw(st.integers(1, 12))
    step = st.integers(0, 40).map(lambda tenths: tenths / 10)
    hand.enter(now, "a", taken=now)
    for bid in range(1, steps + 1):
        turn = now
        hand.plan(now := now + draw(step), bid, draw(st.sampled_from(["extend", "decode"])))
        hand.launch(now := now + draw(step), bid, turn)
        start = max(now, device) + draw(step)
        device = start + draw(step)
        ran: tuple[float, ...] = (start, device)
        if draw(st.booleans()):
            middle = start + (device - start) / 2
            device += (apart := draw(step))
            ran = (start, middle, middle + apart, device, device, device + draw(step))
        wait = now + draw(step)
        now = max(wait, device) + draw(step)
        hand.finish(now, bid, ran, wait)
        if draw(st.booleans()):
            hand.resume(now + 5, since=now)
            now += 5
        hand.process(now := now + draw(step), bid, *(["a"] if bid == steps else []))
        now += draw(step)
    return hand.events


@given(schedules())
def test_the_account_adds_up_on_any_schedule(events: list[Event]) -> None:
    account = overlap_account(events, until="last_launch")
    assert account.device_idle_s == pytest.approx(account.host_exposed_s + account.handoff_s)
    assert account.runnable_s == pytest.approx(account.device_idle_s + account.device_busy_s)
    assert account.host_busy_s + account.host_wait_s + account.parked_s == pytest.approx(account.window_s)
    assert account.host_hidden_s + account.host_exposed_s == pytest.approx(account.host_busy_s)
    host = [row for row in account.stages if row.component == "scheduler"]
    assert sum(row.hidden_s for row in host) == pytest.approx(account.host_hidden_s)
    assert sum(row.exposed_s for row in host) == pytest.approx(account.host_exposed_s)
    forwards = [row.busy_s for row in account.stages if row.component == "device"]
    assert sum(forwards) == pytest.approx(account.device_busy_s)


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(PAIRS, PAIRS)
def test_interval_arithmetic_agrees_with_sets_of_moments(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    def moments(pairs: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in pairs for moment in range(start, end)}

    a, b = normal(left), normal(right)
    assert moments(a) == moments(left) and total(a) == len(moments(left))
    assert moments(both(a, b)) == moments(a) & moments(b)
    assert moments(without(a, b)) == moments(a) - moments(b)
    for result in (a, both(a, b), without(a, b)):
        assert result == normal(result)


# ---------------------------------------------------------------- a stretch of a run that goes on


def at(ms_: float) -> int:
    return round(ms_ * MS) + MS


def test_a_stretch_counts_what_lies_in_it() -> None:
    account = overlap_account(overlap_loop().events, stretch=(at(3), at(23)))
    assert account.until == "given stretch" and ms(account.window_s) == 20
    # 3 to 5, 13.5 to 18 are work, all behind forwards that follow each other without a gap
    assert ms(account.device_busy_s) == 20 and account.device_idle_s == 0
    assert ms(account.host_hidden_s) == 6.5 and account.host_exposed_s == 0
    assert account.launches == 2


def test_stretches_side_by_side_add_up_to_the_whole() -> None:
    events = normal_loop().events
    whole = overlap_account(events, stretch=(at(0), at(32)))
    parts = [overlap_account(events, stretch=(at(a), at(b))) for a, b in ((0, 7), (7, 16.25), (16.25, 32))]
    for name in (
        "host_hidden_s",
        "host_exposed_s",
        "host_wait_s",
        "device_busy_s",
        "device_idle_s",
        "launches",
    ):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name)), name


def test_a_forward_that_is_not_over_is_no_idle_device() -> None:
    """Cut in the middle of the second forward: it is under way, although nothing has told its start."""
    events = [event for event in overlap_loop().events if event.t <= at(18)]
    account = overlap_account(events, stretch=(at(3), at(18)))
    assert account.device_idle_s == 0 and ms(account.device_busy_s) == 15
    assert account.device[-1].start == at(13) and account.device[-1].end == at(18)


def test_who_was_there_before_the_first_event_keeps_the_device_from_resting() -> None:
    """Only the end of the normal loop is known; that a request was in it must be said."""
    events = [event for event in normal_loop().events if event.t >= at(13.5)]
    stretch = (at(14), at(19))
    assert overlap_account(events, stretch=stretch).runnable_s == 0
    account = overlap_account(events, stretch=stretch, open_rids=["a"])
    assert ms(account.runnable_s) == 5 and ms(account.device_idle_s) == 5
    assert ms(account.host_exposed_s) == 4  # 14 to 18
