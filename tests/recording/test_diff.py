"""Two runs compared: the first decision that differs, and what each request lost or won by cause."""

from __future__ import annotations

import pytest
from timed_rig import TimedRig

from sgviz.recording import Cause, Recording


def play(policy: str = "fcfs", **settings: object) -> Recording:
    rig = TimedRig(tokens=256, schedule_policy=policy, max_running_requests=2, **settings)
    for number in range(8):
        rig.submit(
            range(number, number + 10 + 3 * number), 6 + 5 * (number % 3), rid=f"r{number}", ignore_eos=True
        )
    rig.run()
    return rig.recording()


def test_a_run_and_itself_do_not_differ() -> None:
    same = play().diff(play())
    assert same.first is None and same.only_a == same.only_b == ()
    assert (same.requests.change_ms == 0).all() and same.by_cause() == {}
    assert "every decision is the same" in same.text()


def test_another_policy_differs_first_where_it_orders_the_queue() -> None:
    a, b = play("fcfs"), play("lof")
    found = a.diff(b)
    assert found.first is not None
    assert found.first.b.startswith("reorder the queue") or "r" in found.first.b
    assert found.first.number >= 1 and found.first.a != found.first.b
    changes = found.requests.set_index("rid")
    for rid in a.rids:
        ours, theirs = a.explain(rid), b.explain(rid)
        row = changes.loc[rid]
        assert row.change_ms == pytest.approx((theirs.total_ns - ours.total_ns) / 1e6)
        assert sum(row[f"{cause}_ms"] for cause in Cause) == pytest.approx(row.change_ms)
    slower = found.slower()
    assert len(slower) and (slower.change_ms > 0).all()
    worst = slower.iloc[0]
    assert worst.cause_ms > 0 and worst.rid in found.text()
    assert list(found.requests.change_ms.abs()) == sorted(found.requests.change_ms.abs(), reverse=True)


def test_a_request_that_waits_for_slots_is_slower_for_that_reason() -> None:
    a, b = play(), play_with_one_slot()
    found = a.diff(b)
    row = found.requests.set_index("rid").loc["r1"]
    assert row.change_ms > 0 and row.cause == str(Cause.RUNNING_SLOTS) and row.blockers[0] == "r0"
    assert found.first is not None and found.first.number > 1


def play_with_one_slot() -> Recording:
    rig = TimedRig(tokens=256, max_running_requests=1)
    for number in range(8):
        rig.submit(
            range(number, number + 10 + 3 * number), 6 + 5 * (number % 3), rid=f"r{number}", ignore_eos=True
        )
    rig.run()
    return rig.recording()


def test_requests_of_one_run_alone_are_listed() -> None:
    rig = TimedRig(tokens=256, max_running_requests=2)
    rig.submit(range(10), 6, rid="r0", ignore_eos=True)
    rig.submit(range(10), 6, rid="extra", ignore_eos=True)
    rig.run()
    found = rig.recording().diff(play())
    assert found.only_a == ("extra",) and len(found.only_b) == 7 and list(found.requests.rid) == ["r0"]
    assert "only in a: 1 (extra)" in found.text()


def test_empty_recordings_can_be_compared() -> None:
    found = Recording([]).diff(Recording([]))
    assert found.first is None and found.requests.empty and "0 requests in both" in found.text()
