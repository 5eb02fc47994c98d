"""Stepping back over a recording made by hand: where a step lands, and a recording that does not reach so far."""

from __future__ import annotations

import pytest

from sgviz.debugger import past
from sgviz.debugger.past import Past
from sgviz.errors import Unavailable
from sgviz.events import Event
from sgviz.events.schema import LoopIdle, RequestDispatched
from sgviz.messages.debug import Where
from sgviz.recording import Recording


def recorded() -> Recording:
    """Three turns of the scheduler with two events each, and events of another component between them."""
    events = []
    for number in range(6):
        idle = LoopIdle(kv_free=1, kv_evictable=0, kv_protected=0)
        events.append(Event(number + 1, 20 * number, "scheduler", number // 2, idle))
        events.append(Event(number + 1, 20 * number + 10, "tokenizer_manager", 0, RequestDispatched(rid="r")))
    return Recording(events)


def at(seq: int) -> Where:
    return Where(stop_no=1, why="pause", stop="planned", iteration=2, seq=seq)


def test_a_step_lands_behind_an_event_or_an_iteration_of_the_scheduler() -> None:
    rec = recorded()
    steps = Past(lambda: rec, lambda: at(6))
    assert [steps.move("event", -1).count for _ in range(3)] == [11, 9, 7]
    assert steps.move("iteration", -1).count == 3 and steps.move("iteration", 1).count == 7
    assert steps.move("event", -9).count == 0


def test_a_recording_without_the_stop_is_not_stepped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "PATIENCE_S", 0.05)
    rec = recorded()
    with pytest.raises(Unavailable, match="ends at the scheduler's event 6, and it is parked at 9"):
        Past(lambda: rec, lambda: at(9)).move("event", -1)
