"""The fold against a run whose true memory is known, and against losses."""

from __future__ import annotations

import random

import pytest
from recording_checks import assert_idle_memory, assert_memory_adds_up, assert_recording_sound
from synthetic import SyntheticRun

from sgviz.events.schema import BatchPlanned, EngineConfigured, Event, LoopIdle, PoolTaken
from sgviz.recording import Header, Recording, State, fold


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_fold_equals_the_engine_on_random_runs(page: int, seed: int) -> None:
    rec = Recording(SyntheticRun(30, seed=seed, page=page, total=320, gap_us=2_000).events)
    assert_recording_sound(rec)
    assert_idle_memory(rec)


def test_the_runs_evict_split_and_retract() -> None:
    kinds = set(Recording(SyntheticRun(30, seed=1, total=320, gap_us=2_000).events).events.kind)
    assert {"tree.evicted", "tree.split", "request.retracted", "pool.returned", "tree.locked"} <= kinds


def test_ledger_by_owner_is_what_the_requests_hold() -> None:
    run = SyntheticRun(6, seed=3)
    state = State()
    for event in run.events:
        state.apply(event)
        held = state.ledger.private
        assert sum(held.values()) == state.ledger.private_total
        assert all(tokens > 0 for tokens in held.values())
        assert state.ledger.holders() == sorted(held.items(), key=lambda item: (-item[1], item[0]))
        in_tree = sum(node.tokens for node in state.ledger.nodes.values())
        if event.kind in ("batch.planned", "loop.idle"):
            assert in_tree == state.ledger.evictable + state.ledger.protected


def test_a_wrong_number_is_found_and_told_once() -> None:
    events = list(SyntheticRun(4).events)
    at = next(i for i, event in enumerate(events) if isinstance(event.body, BatchPlanned))
    event, plan = events[at], events[at].body
    assert isinstance(plan, BatchPlanned)
    wrong = BatchPlanned(
        **{name: getattr(plan, name) for name in plan.__struct_fields__} | {"kv_evictable": 7}
    )
    events[at] = Event(event.seq, event.t, event.component, event.iteration, wrong)
    found = Recording(events).check()
    assert (found[0].name, found[0].folded, found[0].stated, found[0].bid) == ("evictable", 0, 7, plan.bid)
    assert found[0].seq == event.seq and len(found) <= 4  # and again when the engine is right


def test_a_missing_allocation_is_found_at_the_next_statement() -> None:
    """Dropped without a trace: the sequence numbers are closed up, so only the sums can tell."""
    events, removed = [], False
    for event in SyntheticRun(4).events:
        if isinstance(event.body, PoolTaken) and not removed:
            removed = True
            continue
        less = removed and event.component == "scheduler"
        events.append(Event(event.seq - less, event.t, event.component, event.iteration, event.body))
    rec = Recording(events)
    assert rec.missing == {} and rec.check()


@pytest.mark.parametrize("seed", range(6))
def test_after_a_loss_the_fold_goes_on_from_the_next_statement(seed: int) -> None:
    events = SyntheticRun(20, seed=seed, total=320).events
    at = random.Random(seed).randrange(20, len(events) - 200)
    lost = 37
    rec = Recording(events[:at] + events[at + lost :])
    assert sum(rec.missing.values()) == lost
    kv = rec.kv
    assert (kv.free + kv.evictable + kv.protected + kv.private == kv.total)[kv.exact].all()
    assert rec.check() == [] and kv.exact.iloc[-1]


def test_a_recording_that_begins_later_starts_at_the_first_statement() -> None:
    events = SyntheticRun(20, seed=2, total=320).events
    configured = next(event.body for event in events if isinstance(event.body, EngineConfigured))
    late = Recording(events[len(events) // 2 :], Header(configured=configured))
    whole = Recording(events)
    assert late.check() == []
    assert late.kv.iloc[-1][["free", "evictable", "protected", "private"]].tolist() == (
        whole.kv.iloc[-1][["free", "evictable", "protected", "private"]].tolist()
    )


def test_without_sizes_nothing_is_called_exact() -> None:
    events = [event for event in SyntheticRun(4).events if not isinstance(event.body, EngineConfigured)]
    rec = Recording(events[5:])
    assert not rec.kv.exact.any() and rec.check() == []


def test_fold_is_a_function_of_the_events_alone() -> None:
    events = SyntheticRun(10, seed=5).events
    assert fold(events).kv == fold(list(events)).kv
    one, two = fold(events).state, fold(events).state
    assert one.requests == two.requests and one.batches == two.batches and one.ledger == two.ledger


def test_idle_states_the_numbers_too() -> None:
    events = SyntheticRun(2).events
    last = events[-1]
    assert isinstance(last.body, LoopIdle)
    body = LoopIdle(kv_free=last.body.kv_free - 1, kv_evictable=last.body.kv_evictable, kv_protected=1)
    rec = Recording([*events[:-1], Event(last.seq, last.t, last.component, last.iteration, body)])
    assert [found.name for found in rec.check()] == ["free", "protected"]


def test_memory_adds_up_helper_fails_when_it_should() -> None:
    events = SyntheticRun(4).events
    without = [event for event in events if not isinstance(event.body, PoolTaken)]
    closed = [Event(number, e.t, "scheduler", e.iteration, e.body) for number, e in enumerate(without, 1)]
    with pytest.raises(AssertionError):
        assert_memory_adds_up(Recording(closed))
