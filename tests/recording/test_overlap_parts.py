"""The overlap account where the device tells its parts, and where a debugger held the scheduler."""

from __future__ import annotations

import msgspec
import pytest
from hand_loop import MS, Hand, by_stage, ms, normal_loop

from sgviz.events.schema import AnyBody, BatchFinished
from sgviz.recording import Cause, Recording
from sgviz.recording.overlap_account import overlap_account


def test_sampling_is_device_time_a_copy_is_none() -> None:
    """The normal loop again, its forwards 8 ms of 10, the copies until the result is there."""
    told = Hand()
    for event in normal_loop().events:
        body = event.body
        if isinstance(body, BatchFinished):
            end, ms_ = body.end_ns, (event.t - MS) / MS
            start = (body.start_ns - MS) / MS
            told.finish(
                ms_, body.bid, (start, start + 8, start + 8, start + 10, start + 10, ms_), wait=start - 1
            )
            assert end == told.events[-1].body.end_ns  # type: ignore[union-attr]
        else:
            told.at((event.t - MS) / MS, body)
    plain = overlap_account(normal_loop().events, until="last_launch")
    account = overlap_account(told.events, until="last_launch")
    assert account.row() == plain.row()
    stages = by_stage(account)
    assert ms(stages["extend"].busy_s) == 8 and ms(stages["sample"].busy_s) == 2
    assert {row.component for row in account.stages if row.stage in ("extend", "sample")} == {"device"}
    assert [(span.stage, span.bid) for span in account.device] == [
        ("extend", 1), ("sample", 1), ("decode", 2), ("sample", 2),
    ]  # fmt: skip
    assert [ms((span.end - span.start) / 1e9) for span in account.copies] == [0.5, 0.5]


def test_a_device_that_waits_for_its_delayed_sampling_stands_still() -> None:
    hand = Hand()
    hand.enter(0.5, "a", taken=0)
    hand.plan(1, 1)
    hand.launch(2, 1, turn=0)
    # forward 2 to 6, sampling 9 to 10; the host works from 3 to 9, 3 to 6 of it behind the forward
    hand.process(9, 0)
    hand.finish(11, 1, (2, 6, 9, 10, 10, 10.5), wait=9)
    hand.process(12, 1, "a")
    hand.plan(13, 2)
    hand.launch(14, 2, turn=12.5)
    account = overlap_account(hand.events, until="last_launch")
    assert ms(account.device_busy_s) == 5 and ms(account.device_idle_s) == 7  # to 2, 6 to 9, 10 to 12
    assert ms(account.host_hidden_s) == 4 and ms(account.host_exposed_s) == 2 + 3 + 1


def test_what_a_debugger_held_up_counts_nowhere() -> None:
    """The normal loop, held for 100 ms in the middle of planning and for 50 while it waits for a message."""
    held = Hand()
    for event in normal_loop().events:
        ms_ = (event.t - MS) / MS
        late = 100 if ms_ >= 17 else 0
        held.at(ms_ + late, _later(event.body, late))
        if ms_ == 15.5:
            held.resume(116.5, since=16.5)
    plain = overlap_account(normal_loop().events, until="last_launch")
    account = overlap_account(held.events, until="last_launch")
    assert ms(account.parked_s) == 100 and ms(account.window_s) == ms(plain.window_s) + 100
    same = {"window_s", "parked_s"}
    for name, value in plain.row().items():
        if name not in same:
            found = account.row()[name]
            assert found == (pytest.approx(value) if isinstance(value, float) else value), name
    assert sum(span.end - span.start for span in account.host) == sum(
        span.end - span.start for span in overlap_account(normal_loop().events).host
    )


def _later(body: AnyBody, late: float) -> AnyBody:
    """The same with its stamps of the second batch moved."""
    names = [name for name in body.__struct_fields__ if name.endswith("_ns") and name != "received_ns"]
    moved = {}
    for name in names:
        value = getattr(body, name)
        moved[name] = value + round(late * MS) if late and value > round(16.4 * MS) + MS else value
    return msgspec.structs.replace(body, **moved)


def test_a_turn_that_launches_nothing_is_explained_until_it_waits_for_the_last_result() -> None:
    """The last batch runs while the one before is processed; the turn after that finds nothing to plan."""
    hand = Hand()
    hand.enter(0.5, "a", taken=0)
    hand.plan(1, 1, "extend")
    hand.launch(2, 1, turn=0)
    hand.plan(4, 2)
    hand.launch(5, 2, turn=3)
    hand.finish(8, 1, (2, 7), wait=5.5)
    hand.process(9, 1)
    hand.finish(14, 2, (7, 9.5), wait=11)  # 9.5 to 11: the loop, that nothing keeps busy
    hand.process(15, 2, "a")
    parts = Recording(hand.events).explain("a").parts
    assert Cause.UNEXPLAINED not in [part.cause for part in parts]
    last = [(part.cause, (part.start_ns - MS) / MS, (part.end_ns - MS) / MS) for part in parts][-3:]
    assert last == [(Cause.LOOP, 9.5, 11), (Cause.HANDOVER, 11, 14), (Cause.PROCESSING, 14, 15)]
