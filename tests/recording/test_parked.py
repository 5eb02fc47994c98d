"""Time in which a debugger held the scheduler has a cause of its own, and every sum stays exact."""

from __future__ import annotations

import itertools
import threading
import time

from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from random_runs import cases, run
from recording_checks import assert_books_balance, seamless
from timed_rig import TimedRig
from workload import Step, crowd

from sgviz.engine import Engine
from sgviz.events.schema import LoopResumed
from sgviz.recording import Cause, Part, Recording
from sgviz.recording.intervals import Interval, both, normal, total, without
from sgviz.recording.parked import HELD, Park, Parked
from sgviz.scheduler.stops import Stop

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=8)


def held_run(
    case: tuple[dict[str, object], list[Step]], lengths: list[int]
) -> tuple[TimedRig, list[Interval]]:
    """The random workload, in a scheduler that is held at its stops for `lengths` ns in turn (0: not)."""
    parks: list[Interval] = []
    turns = itertools.cycle(lengths)

    class HeldRig(TimedRig):
        def stop(self) -> Stop:
            stop = super().stop()
            if length := next(turns):
                since = self.clock.now()
                self.clock.advance(length)
                self.state.trace.emit(LoopResumed(since_ns=since, at=stop.value, why="step"))
                parks.append((since, since + length))
            return stop

    rig, _ = run(*case, HeldRig)
    return rig, parks


def parked_ns(rec: Recording, rid: str) -> int:
    return sum(part.duration_ns for part in rec.explain(rid).parts if part.cause is Cause.PARKED)


@given(st.lists(st.tuples(st.sampled_from(list(Cause)), st.integers(1, 20)), max_size=12), LENGTHS, LENGTHS)
def test_laid_over_any_parts_it_takes_what_the_scheduler_owed_and_nothing_else(
    given_parts: list[tuple[Cause, int]], gaps: list[int], lengths: list[int]
) -> None:
    parts: list[Part] = []
    at = 0
    for cause, length in given_parts:
        parts.append(Part(at, length, cause, ("a",), "words", 7))
        at += length
    parks: list[Park] = []
    now = 0
    for gap, length in zip(gaps, lengths):
        parks.append(Park(now + gap, now + gap + length, f"park {len(parks)}"))
        now += gap + length
    found = list(Parked(parks).over(parts))

    def moments(of: list[Part]) -> dict[int, Cause]:
        return {t: part.cause for part in of for t in range(part.start_ns, part.end_ns)}

    held = {t for park in parks for t in range(park.start, park.end)}
    expected = {
        t: Cause.PARKED if t in held and cause in HELD else cause for t, cause in moments(parts).items()
    }
    assert moments(found) == expected and sum(part.duration_ns for part in found) == at
    assert all(part.end_ns == after.start_ns for part, after in itertools.pairwise(found))
    for part in found:
        assert (part.blockers == ("a",)) == (part.cause is not Cause.PARKED or part.detail == "words")
        touched = Parked(parks).touches(part.start_ns, part.end_ns)
        assert touched == bool(held & set(range(part.start_ns, part.end_ns)))


@profile(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(cases(), st.lists(st.sampled_from([0, 0, 0, 1, 900, 3_000_000]), min_size=1, max_size=6))
def test_random_lives_that_were_stepped_through(
    case: tuple[dict[str, object], list[Step]], lengths: list[int]
) -> None:
    rig, parks = held_run(case, lengths)
    check(rig, parks)


def test_crowded_lives_that_were_stepped_through() -> None:
    for overlap in (True, False):
        config: dict[str, object] = {
            "tokens": 192, "chunked_prefill_size": 16, "schedule_conservativeness": 0.001,
            "disable_overlap_schedule": not overlap,
        }  # fmt: skip
        rig, parks = held_run((config, crowd(3)), [0, 2_000_000, 0, 700])
        check(rig, parks)
        assert any(parked_ns(rig.recording(), rid) for rid in rig.recording().rids)


def check(rig: TimedRig, parks: list[Interval]) -> None:
    """Sums are exact; what is parked is what lies in the parks, except where the device went on."""
    rec = rig.recording()
    held = normal(parks)
    device = normal((batch.start, batch.end) for batch in rec.fold().state.batches.values() if batch.end)
    explainer = rec.explainer()
    for rid in rec.rids:
        explanation = rec.explain(rid)
        seamless(explanation)
        assert explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
        whole = both(held, [(explanation.start_ns, explanation.start_ns + explanation.total_ns)])
        assert total(without(whole, device)) <= parked_ns(rec, rid) <= total(whole), explanation.text()
        stays = explainer.standings.stays.get(rid, [])
        waited = sum((stay.end or rec.t_end) - stay.start for stay in stays)
        assert sum(explainer.queue_waits(rec.request(rid)).values()) == waited
    assert rec.check() == []
    assert_books_balance(rec)


def test_a_real_debugger_is_named_and_takes_its_time_out_of_the_account() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=1.0) as engine:
        with engine.debugger() as debugger:
            debugger.breakpoints.add(lambda event: event.kind == "batch.processed" and event.iteration > 0)
            asked = {"input_ids": [5, 6, 7, 8], "rid": "held", "sampling_params": {"max_new_tokens": 4}}
            client = threading.Thread(target=lambda: engine.generate(**asked))  # type: ignore[arg-type]
            client.start()
            where = debugger.wait()
            time.sleep(0.25)
            assert where.event is not None and where.event.kind == "batch.processed"
            debugger.breakpoints.clear()
            debugger.breakpoints.add(lambda event: event.kind == "loop.resumed")  # never a place to park
            debugger.continue_()
            client.join(30)
        rec = engine.recording().freeze()
    resumed = [event for event in rec.stamped() if isinstance(event.body, LoopResumed)]
    (told,) = [event for event in resumed if event.body.at == "batch.processed"]
    assert told.t - told.body.since_ns >= 0.24e9 and "breakpoint 1" in told.body.why
    explanation = rec.explain("held")
    seamless(explanation)
    (part,) = [part for part in explanation.parts if part.cause is Cause.PARKED and part.duration_ns > 0.2e9]
    assert part.start_ns == told.body.since_ns and part.end_ns == told.t
    assert part.detail.startswith("held at batch.processed: breakpoint 1")
    assert "parked by a debugger" in explanation.text()
    assert rec.audit().balanced and rec.check() == []
