"""Where the debugger stops: at stops of the loop, at decisions, at breakpoints, checked against the recording."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable

import pytest
from debug_tools import Load, Moody, eventually, kinds, of_scheduler

from sgviz.debugger import Debugger
from sgviz.engine import Engine
from sgviz.errors import BadRequest, NotFound, Unavailable
from sgviz.events import Event
from sgviz.messages.debug import Where
from sgviz.scheduler.gate.vocabulary import DECISIONS, KINDS


def under_grammar(engine: Engine, length: int) -> None:
    """One that is not in the cache yet."""
    engine.generate("x", {"regex": f"[a-c]{{{length}}}", "max_new_tokens": 2})


def paused(engine: Engine) -> None:
    engine.pause_generation("in_place")
    engine.continue_generation()


def in_a_session(engine: Engine) -> None:
    session = engine.open_session(1000)
    engine.generate("x", {"max_new_tokens": 2}, session_params={"id": session})
    engine.close_session(session)


def slowed(engine: Engine) -> None:
    engine.slow_down(0.001)
    engine.slow_down(None)


def profiled(engine: Engine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder)
        engine.stop_profile()


# what makes an event happen that no load makes
CALLS: dict[str, Callable[[Engine], object]] = {
    "grammar.queued": lambda engine: under_grammar(engine, 5),
    "grammar.ready": lambda engine: under_grammar(engine, 6),
    "embeddings.pooled": lambda engine: engine.encode("x"),
    "generation.paused": paused,
    "generation.continued": paused,
    "session.opened": in_a_session,
    "session.turn": in_a_session,
    "session.closed": in_a_session,
    "forwards.slowed": slowed,
    "profile.started": profiled,
    "profile.ended": profiled,
}


def provoke(
    engine: Engine, moody: Moody, debugger: Debugger, kind: str
) -> tuple[Load | threading.Thread | None, Where]:
    """Do what makes an event of that kind happen, until it parks."""
    if kind == "cache.flushed":
        engine.pipeline.loop.submit(engine.pipeline.manager.flush_cache())
        return None, debugger.wait()
    if kind == "limits.changed":
        debugger.pause()
        debugger.set_limits(chunked_prefill_size=16)
        return None, debugger.run()
    if kind in CALLS:
        call = threading.Thread(target=CALLS[kind], args=(engine,), daemon=True)
        call.start()
        return call, debugger.wait()
    moody.moody = kind == "policy.failed"
    for _ in range(10):  # when the requests arrive decides whether one of them is retracted
        load = Load(engine)
        if kind == "request.aborted":
            eventually(lambda: "r3" in engine.pipeline.manager.rid_to_state)
            engine.abort("r3")
        eventually(lambda load=load: debugger.parked or load.done)  # type: ignore[misc]
        if debugger.parked:
            return load, debugger.wait()
    raise AssertionError(f"{kind} did not happen")


# these need other weights, or a second server: tests of their own below and in test_debugger_pair.py
OTHERS = ("weights.updated", "disagg.", "kv.")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(OTHERS)])
def test_a_breakpoint_on_a_kind_stops_exactly_at_its_first_event(
    engine: Engine, plain: dict[str, list[int]], moody: Moody, kind: str
) -> None:
    with engine.debugger() as debugger:
        before = debugger.pause().seq
        debugger.continue_()
        number = debugger.breakpoints.add(kind)
        load, where = provoke(engine, moody, debugger, kind)
        time.sleep(0.05)  # were it running, it would emit
        events = of_scheduler(engine, before)
        first = next(event for event in events if event.kind == kind)
        assert where.event == first and where.seq == first.seq
        assert events[-1] == first, f"after it came {kinds(events[events.index(first) + 1 :])}"
        assert where.iteration == first.iteration and f"breakpoint {number}" in where.why
        assert len(where.decided) == 1 and where.decided[0]
        moody.moody = False
    if isinstance(load, threading.Thread):
        load.join(30)
        assert not load.is_alive(), "the call hangs"
    elif load is not None:
        ended = load.join()
        cut = {"r3"} if kind == "request.aborted" else set()
        assert {rid: ids for rid, ids in ended.items() if rid not in cut} == {
            rid: ids for rid, ids in plain.items() if rid not in cut
        }


def test_a_breakpoint_on_other_weights_stops_when_they_are_there() -> None:
    with Engine("tiny-llama", device="cpu", enable_debugger=True) as engine:
        folder = str(engine.pipeline.model_dir)
        with engine.debugger() as debugger:
            debugger.breakpoints.add("weights.updated")
            update = threading.Thread(target=engine.update_weights_from_disk, args=(folder,), daemon=True)
            update.start()
            where = debugger.wait()
            assert where.kind == "weights.updated" and where.event == of_scheduler(engine)[-1]
        update.join(30)
        assert not update.is_alive()


def test_stops_come_in_the_order_of_the_loop(engine: Engine) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine, count=3, tokens=4)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 3)
        debugger.run('planned and mode == "extend"')
        stops = [debugger.step() for _ in range(8)]
    assert [stop.stop for stop in stops[:4]] == ["planned", "launched", "processed", "received"]
    assert [stop.stop_no for stop in stops] == list(range(stops[0].stop_no, stops[0].stop_no + 8))
    assert [stop.iteration for stop in stops[:4]] == [stops[0].iteration] * 3 + [stops[0].iteration + 1]
    load.join()


def test_decisions_and_iterations_are_stepped_one_by_one(engine: Engine) -> None:
    with engine.debugger() as debugger:
        start = debugger.pause().seq
        load = Load(engine, count=4, tokens=10)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 4)
        seen = [debugger.step("decision").event for _ in range(4)]
        told = [event for event in of_scheduler(engine, start) if event.kind in DECISIONS]
        assert seen == told
        here = debugger.where
        assert here is not None
        turns = [debugger.step("iteration") for _ in range(3)]
    assert [turn.iteration for turn in turns] == [here.iteration + 1, here.iteration + 2, here.iteration + 3]
    assert {turn.stop for turn in turns} == {"received"}
    load.join()


def test_one_request_is_followed_to_prefill_first_token_and_end(engine: Engine) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine, count=6, tokens=6)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 6)
        prefill = debugger.step(rid="r4", to="prefill")
        assert prefill.kind == "batch.planned" and "r4" in prefill.event.body.rids
        first = debugger.step(rid="r4", to="first token")
        assert first.kind == "tokens.sampled" and "r4" in first.event.body.rids
        assert next(view for view in debugger.running if view.rid == "r4").output == 1
        with pytest.raises(BadRequest, match="has its first token already"):
            debugger.step(rid="r4", to="first token")
        with pytest.raises(BadRequest, match="past its prefill"):
            debugger.step(rid="r4", to="prefill")
        end = debugger.step(rid="r4", to="finish")
        assert end.kind == "batch.processed" and "r4" in end.event.body.finished
    load.join()


def test_breakpoints_survive_continue_and_can_be_listed_and_removed(engine: Engine) -> None:
    with engine.debugger() as debugger:
        first = debugger.breakpoints.add("planned and batch.size >= 1")
        second = debugger.breakpoints.add("cut")
        load = Load(engine, count=6, tokens=6)
        for _ in range(3):
            debugger.wait()
            debugger.continue_()
        debugger.pause()
        hits = {point.number: point.hits for point in debugger.breakpoints}
        assert set(hits) == {first, second} and sum(hits.values()) >= 3
        assert [point.text for point in debugger.breakpoints] == ["planned and batch.size >= 1", "cut"]
        debugger.breakpoints.remove(first)
        with pytest.raises(NotFound, match=f"no breakpoint {first}; there are {second}"):
            debugger.breakpoints.remove(first)
        debugger.breakpoints.clear()
        debugger.continue_()
        load.join()
        assert len(debugger.breakpoints) == 0 and not debugger.parked


def test_a_python_predicate_parks_and_one_that_raises_is_switched_off(engine: Engine) -> None:
    seen: list[Event] = []

    def third_plan(event: Event) -> bool:
        seen.append(event)
        return event.kind == "batch.planned" and sum(one.kind == "batch.planned" for one in seen) == 3

    def broken(event: Event) -> bool:
        raise RuntimeError("no idea")

    with engine.debugger() as debugger:
        load = Load(engine, count=3, tokens=20)
        where = debugger.run(third_plan)
        assert where.event == seen[-1] and where.kind == "batch.planned"
        number = debugger.breakpoints.add(broken)
        where = debugger.run()
        assert "switched off: it raised RuntimeError: no idea" in where.why
        assert debugger.breakpoints[0].number == number and "no idea" in debugger.breakpoints[0].fault
        debugger.continue_()
        load.join()


def test_nothing_that_happens_leaves_the_run_alone(engine: Engine) -> None:
    with engine.debugger() as debugger:
        with pytest.raises(Unavailable, match="nothing stopped the run in time"):
            debugger.run("retracted", timeout=0.2)
        Load(engine, count=2, tokens=3).join()  # the step is forgotten
        with pytest.raises(BadRequest, match="column 1: unknown name"):
            debugger.run("retrackted_", timeout=5)
        with pytest.raises(BadRequest, match="not one of stop, decision"):
            debugger.step("decisions")  # type: ignore[arg-type]
