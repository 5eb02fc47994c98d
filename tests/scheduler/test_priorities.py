"""The order by priority, the limit of the queue under it, and requests that bring a priority where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rig import Rig

from sgviz.batch.req import Req
from sgviz.config import Settings
from sgviz.errors import ConfigError
from sgviz.events import Reason
from sgviz.events.schema import QueueEntered, QueueSorted, RequestAborted
from sgviz.scheduler.policy import PolicyView
from sgviz.scheduler.stops import Stop

ON = {"enable_priority_scheduling": True}


def order_of(rig: Rig, wanted: Sequence[tuple[str, int | None, int]]) -> list[str]:
    """In which order requests `(rid, priority, max_new_tokens)` that come together enter the forward, one at a time."""
    for rid, priority, max_new in wanted:
        rig.submit(range(10), max_new, rid=rid, priority=priority, ignore_eos=True)
    seen: list[str] = []
    for _ in range(4000):
        stop = rig.stop()
        if stop is Stop.PLANNED and rig.state.last_batch is not None:
            seen += [req.rid for req in rig.state.last_batch.reqs if req.rid not in seen]
        if stop is Stop.IDLE and rig.state.is_fully_idle:
            break
    rig.check_empty()
    return seen


FIVE = [("a", 1, 4), ("b", 3, 5), ("none", None, 9), ("c", 3, 6), ("d", 2, 7)]


def test_higher_first_and_then_in_order_of_arrival() -> None:
    rig = Rig(max_running_requests=1, **ON)
    assert order_of(rig, FIVE) == ["b", "c", "d", "a", "none"]
    assert {body.policy for body in rig.bodies(QueueSorted)} == {"priority, fcfs"}
    told = {body.rid: body.priority for body in rig.bodies(QueueEntered)}
    assert told["b"] == 3 and told["none"] is not None and told["none"] < -(2**62)


def test_the_other_way_round() -> None:
    rig = Rig(max_running_requests=1, schedule_low_priority_values_first=True, **ON)
    assert order_of(rig, FIVE) == ["a", "d", "b", "c", "none"]


def test_the_default_value_stands_for_none() -> None:
    rig = Rig(max_running_requests=1, default_priority_value=2, **ON)
    assert order_of(rig, FIVE) == ["b", "c", "none", "d", "a"]


def test_lof_orders_among_equals() -> None:
    rig = Rig(max_running_requests=1, schedule_policy="lof", **ON)
    assert order_of(rig, FIVE) == ["c", "b", "d", "a", "none"]


class LastFirst:
    name = "last-first"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        return sorted(waiting, key=lambda req: -req.arrival)


class Raises:
    name = "raises"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        raise RuntimeError("no")


def test_a_policy_of_ones_own_orders_among_equals() -> None:
    rig = Rig(max_running_requests=1, policy=LastFirst(), **ON)
    assert order_of(rig, FIVE) == ["c", "b", "d", "a", "none"]


def test_priorities_hold_where_the_policy_fails() -> None:
    rig = Rig(max_running_requests=1, policy=Raises(), **ON)
    assert order_of(rig, FIVE) == ["b", "c", "d", "a", "none"]


def test_without_the_setting_a_priority_changes_nothing() -> None:
    rig = Rig(max_running_requests=1)
    assert order_of(rig, FIVE) == ["a", "b", "none", "c", "d"]
    assert {body.priority for body in rig.bodies(QueueEntered)} == {None}


def test_without_the_setting_a_priority_can_be_refused() -> None:
    rig = Rig(abort_on_priority_when_disabled=True)
    brought, plain = rig.submit(range(5), priority=0), rig.submit(range(5))
    rig.run()
    assert rig.answers[brought].status == 503 and "priority 0" in rig.answers[brought].finish.message
    assert rig.answers[plain].reason == "length"


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "random"])
def test_policies_that_priorities_would_undo_are_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule_policy = '{policy}'"):
        Settings.build(enable_priority_scheduling=True, schedule_policy=policy)
    Settings.build(schedule_policy=policy)


def test_a_newcomer_that_fits_does_not_wait_behind_one_that_does_not() -> None:
    """The batch was full for the low one; that says nothing of the high one, which is small."""
    rig = Rig(tokens=128, disable_priority_preemption=True, schedule_conservativeness=1.0, **ON)
    rig.submit(range(40), 60, rid="runs", priority=9, ignore_eos=True)
    rig.until_true(lambda: bool(rig.state.live) and not rig.state.waiting_queue)
    rig.submit(range(50, 90), 60, rid="low", priority=1)
    for _ in range(9):
        rig.stop()
    assert [req.rid for req in rig.state.waiting_queue] == ["low"] and "runs" in rig.state.live
    rig.submit(range(3), 2, rid="high", priority=5)
    rig.until_true(lambda: rig.answers["high"].finals == 1)
    assert [req.rid for req in rig.state.waiting_queue] == ["low"] and not rig.answers["runs"].finals
    rig.run()
    rig.check_empty()


# ---------------------------------------------------------------- the limit of the queue


def full(rig: Rig, waiting: Sequence[tuple[str, int | None]]) -> None:
    """One runs, these wait, and there is no place for more."""
    rig.submit(range(10), 90, rid="runs", priority=99, ignore_eos=True)
    rig.until_true(lambda: "runs" in rig.state.live and not rig.state.waiting_queue)
    for rid, priority in waiting:
        rig.submit(range(10), 5, rid=rid, priority=priority)
    rig.until(Stop.RECEIVED)
    assert len(rig.state.waiting_queue) == len(waiting)


LIMITED = {"max_running_requests": 1, "max_queued_requests": 3, **ON}


def test_the_lowest_and_newest_leaves_for_a_higher_one() -> None:
    rig = Rig(**LIMITED)
    full(rig, [("a", 1), ("b", 1), ("c", 5)])
    rig.submit(range(10), 5, rid="new", priority=2)
    rig.run()
    gone = rig.answers["b"]
    assert (gone.status, gone.finals, gone.reason) == (
        503,
        1,
        "abort",
    ) and "higher priority" in gone.finish.message
    assert [rig.answers[rid].reason for rid in ("runs", "a", "c", "new")] == ["length"] * 4
    told = next(body for body in rig.bodies(RequestAborted) if body.rid == "b")
    assert (told.where, told.reason) == ("waiting", Reason.PRIORITY)
    rig.check_empty()


@pytest.mark.parametrize("priority", [1, 0, None])
def test_one_that_is_not_higher_is_refused_itself(priority: int | None) -> None:
    rig = Rig(**LIMITED)
    full(rig, [("a", 1), ("b", 1), ("c", 5)])
    rig.submit(range(10), 5, rid="new", priority=priority)
    rig.run()
    assert rig.answers["new"].status == 503 and "queue is full" in rig.answers["new"].finish.message
    assert [rig.answers[rid].reason for rid in "abc"] == ["length"] * 3
    rig.check_empty()


def test_one_whose_client_has_begun_to_read_is_not_dropped() -> None:
    """A preempted request waits again, the lowest of all; the next one above it goes."""
    rig = Rig(max_running_requests=1, max_queued_requests=2, priority_scheduling_preemption_threshold=0, **ON)
    rig.submit(range(10), 20, rid="begun", priority=0, ignore_eos=True)
    rig.until_true(lambda: len(rig.answers["begun"].output_ids) >= 3)
    rig.submit(range(20, 30), 40, rid="runs", priority=50, ignore_eos=True)
    rig.until_true(lambda: [req.rid for req in rig.state.waiting_queue] == ["begun"])
    rig.submit(range(10), 5, rid="mid", priority=1)
    rig.until(Stop.RECEIVED)
    rig.submit(range(10), 5, rid="new", priority=7)
    rig.run()
    assert rig.answers["mid"].status == 503
    assert len(rig.answers["begun"].output_ids) == 20 and rig.answers["new"].reason == "length"
    rig.check_empty()


def test_without_priorities_the_newcomer_is_refused() -> None:
    rig = Rig(max_running_requests=1, max_queued_requests=1)
    rig.submit(range(10), 20, rid="runs", ignore_eos=True)
    rig.until_true(lambda: "runs" in rig.state.live and not rig.state.waiting_queue)
    for rid, priority in (("a", 0), ("b", 9)):
        rig.submit(range(10), 5, rid=rid, priority=priority)
    rig.run()
    assert rig.answers["b"].status == 503 and rig.answers["a"].reason == "length"
