"""The audit passes what the engine does, and names the very event that breaks the books."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from random_runs import cases, run
from timed_rig import TimedRig
from workload import Step, crowd

from sgviz.events.schema import (
    AnyBody,
    Event,
    OutputStreamed,
    PoolReturned,
    PoolTaken,
    RowReturned,
    TreeEvicted,
    TreeLocked,
)
from sgviz.recording import Header, Recording

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@profile(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(cases())
def test_random_runs_balance(case: tuple[dict[str, object], list[Step]]) -> None:
    report = run(*case)[0].recording().audit()
    assert report.balanced and report.audited == report.events and report.live == (), str(report)


@pytest.fixture(scope="module")
def rig() -> TimedRig:
    config: dict[str, object] = {
        "tokens": 192,
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.001,
    }
    return run(config, crowd(3))[0]


def broken(
    rig: TimedRig, change: Callable[[Event], AnyBody | None], drop: bool = False
) -> tuple[Recording, Event]:
    """The run with the first event that `change` answers for replaced (or left out), and that event."""
    events = rig.events()
    at, body = next((i, made) for i, event in enumerate(events) if (made := change(event)) is not None)
    event = events[at]
    new = [] if drop else [Event(event.seq, event.t, event.component, event.iteration, body)]
    rest = [
        Event(other.seq - drop, other.t, other.component, other.iteration, other.body)
        for other in events[at + 1 :]
    ]
    return Recording([*events[:at], *new, *rest], Header(configured=rig.configured())), event


def replaced(kind: type, **fields: object) -> Callable[[Event], AnyBody | None]:
    def change(event: Event) -> AnyBody | None:
        if not isinstance(event.body, kind) or event.iteration < 20:
            return None
        return msgspec.structs.replace(event.body, **fields)

    return change


def test_a_lost_allocation_is_noticed_at_the_next_statement_of_free(rig: TimedRig) -> None:
    rec, lost = broken(
        rig, lambda event: event.body if isinstance(event.body, PoolTaken) else None, drop=True
    )
    first = rec.audit().findings[0]
    assert first.t >= lost.t and not rec.audit().balanced


def test_a_slot_taken_twice_names_slot_owner_and_event(rig: TimedRig) -> None:
    taken: list[PoolTaken] = []

    def change(event: Event) -> AnyBody | None:
        if not isinstance(event.body, PoolTaken):
            return None
        taken.append(event.body)
        if len(taken) < 2:
            return None
        same = taken[0].slots[:4] + event.body.slots[4:]
        return msgspec.structs.replace(event.body, slots=same)

    rec, event = broken(rig, change)
    first = rec.audit().findings[0]
    assert (first.seq, first.rule) == (event.seq, "a slot is taken once")
    assert "is held by" in first.detail and f"scheduler #{event.seq}" in str(first)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (replaced(PoolReturned, rid="stranger"), "a slot comes back from its owner"),
        (replaced(PoolReturned, free=1), "free is what was not taken"),
        (replaced(RowReturned, rid="stranger"), "a row comes back from its owner"),
        (replaced(TreeLocked, tokens=9_999), "a lock protects what it says"),
        (replaced(TreeEvicted, tokens=9_999), "an evicted node has its tokens"),
        (replaced(TreeEvicted, node=9_999), "an evicted node is in the tree"),
    ],
)
def test_a_wrong_event_is_named(rig: TimedRig, change: Callable[[Event], AnyBody | None], rule: str) -> None:
    rec, event = broken(rig, change)
    first = rec.audit().findings[0]
    assert (first.seq, first.kind, first.rule) == (event.seq, event.kind, rule), str(rec.audit())


def test_a_lock_that_is_never_released_is_noticed_when_its_holder_ends(rig: TimedRig) -> None:
    def release(event: Event) -> AnyBody | None:
        return event.body if isinstance(event.body, TreeLocked) and event.body.delta < 0 else None

    rec, lost = broken(rig, release, drop=True)
    rules = {finding.rule for finding in rec.audit().findings}
    assert "an ended request holds no lock" in rules or "a lock protects what it says" in rules
    assert rec.audit().findings[0].t >= lost.t


def test_a_second_end_is_noticed(rig: TimedRig) -> None:
    events = rig.events()
    at = next(i for i, e in enumerate(events) if isinstance(e.body, OutputStreamed) and any(e.body.finished))
    event = events[at]
    again = Event(event.seq + 1, event.t, event.component, event.iteration, event.body)
    later = [Event(e.seq + 1, e.t, e.component, e.iteration, e.body) for e in events[at + 1 :]]
    rec = Recording([*events[: at + 1], again, *later], Header(configured=rig.configured()))
    first = rec.audit().findings[0]
    assert (first.seq, first.rule) == (event.seq + 1, "a request ends once")


def test_after_a_loss_the_rest_is_not_audited_and_that_is_said(rig: TimedRig) -> None:
    events = rig.events()
    rec = Recording(events[:300] + events[310:], Header(configured=rig.configured()))
    report = rec.audit()
    assert report.audited == 300 and report.events == len(events) - 10 and report.balanced
    assert "lost after 300" in str(report)
