"""However a debugger ends, the engine runs on; while it is parked nothing runs out of time or gets lost."""

from __future__ import annotations

import gc
import time

import pytest
from debug_tools import TIGHT, Load, eventually, of_scheduler, prompt

from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, NotFound, Unavailable


def test_leaving_the_context_lets_it_run_on(engine: Engine, plain: dict[str, list[int]]) -> None:
    with engine.debugger() as debugger:
        debugger.breakpoints.add("decision")
        load = Load(engine)
        debugger.wait()
    assert load.join() == plain
    with pytest.raises(Unavailable, match="closed"):
        debugger.step()


def test_an_exception_lets_it_run_on(engine: Engine, plain: dict[str, list[int]]) -> None:
    with pytest.raises(ZeroDivisionError), engine.debugger() as debugger:
        debugger.breakpoints.add("planned")
        load = Load(engine)
        debugger.wait()
        _ = 1 / 0
    assert load.join() == plain


def test_a_forgotten_debugger_lets_it_run_on(engine: Engine, plain: dict[str, list[int]]) -> None:
    debugger = engine.debugger(lease_s=0.5)
    debugger.breakpoints.add("planned")
    load = Load(engine)
    debugger.wait()
    time.sleep(1.0)
    assert debugger.parked  # its heart beats on
    del debugger
    gc.collect()
    assert load.join() == plain
    with engine.debugger() as debugger:
        assert debugger.status.note == ""


def test_a_debugger_without_a_sign_of_life_is_told_so(engine: Engine) -> None:
    with engine.debugger(lease_s=0.3) as debugger:
        debugger.pause()
        debugger._heartbeat.stop()
        eventually(lambda: not debugger.status.attached)
        assert "no sign of life for 0.3 s" in debugger.status.note
        with pytest.raises(NotFound, match=r"not attached: the debugger gave no sign of life"):
            debugger.step()
    Load(engine, count=2).join()


def test_only_one_debugger_at_a_time(engine: Engine) -> None:
    with engine.debugger(), pytest.raises(Unavailable, match="another debugger is attached"):
        engine.debugger()
    with engine.debugger():
        pass


def test_closing_the_engine_lets_it_run_to_its_end() -> None:
    engine = Engine("tiny-llama", **TIGHT)
    debugger = engine.debugger()
    debugger.breakpoints.add("planned")
    load = Load(engine, count=4)
    debugger.wait()
    engine.close()
    assert all(load.join().values()) and set(load.reasons.values()) <= {"length", "stop"}
    debugger.close()


def test_requests_and_aborts_wait_in_order_while_parked(engine: Engine, plain: dict[str, list[int]]) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 12)
        engine.abort("r5")
        state = engine.internal_state()
        assert state["parked"] and state["num_live_reqs"] == 0
        assert engine.pipeline.loop.call(engine.pipeline.manager.health_generate(1.0)) is None
        debugger.continue_()
        ended = load.join()
    assert load.reasons.pop("r5") == "abort" and ended["r5"] == []
    assert {rid: ids for rid, ids in ended.items() if rid != "r5"} == {
        rid: ids for rid, ids in plain.items() if rid != "r5"
    }


def test_time_limits_and_watchdog_stand_still_while_parked() -> None:
    with Engine("tiny-llama", watchdog_timeout=0.5, **TIGHT) as engine:
        manager, loop = engine.pipeline.manager, engine.pipeline.loop
        with engine.debugger() as debugger:
            load = Load(engine, count=3)
            debugger.run("launched")
            flush = loop.submit(manager.flush_cache(timeout=0.3))
            time.sleep(1.5)
            assert not flush.done() and not engine.pipeline.dead.is_set()
            debugger.continue_()
            assert flush.result(5).success in (True, False)
        load.join()
        assert not engine.pipeline.dead.is_set()


def test_two_engines_of_which_one_is_parked_leave_each_other_alone(engine: Engine) -> None:
    with Engine("tiny-llama", **TIGHT) as other, engine.debugger() as debugger:
        debugger.breakpoints.add("planned")
        held = Load(engine, count=4)
        debugger.wait()
        free = Load(other, count=4).join()
        with other.debugger() as second:
            second.pause()
            assert debugger.parked and second.parked
        assert held.outputs == {} and not other.internal_state()["parked"]
        debugger.breakpoints.clear()
        debugger.continue_()
        assert held.join() == free


def test_an_engine_without_events_has_nothing_to_step_by() -> None:
    with (
        Engine("tiny-llama", disable_events=True, **TIGHT) as engine,
        pytest.raises(BadRequest, match="switched off"),
    ):
        engine.debugger()


@pytest.mark.parametrize("event_loop", ["normal", "overlap"])
def test_both_loops_give_the_same_tokens_when_stepped(event_loop: str) -> None:
    with Engine("tiny-llama", event_loop=event_loop, **TIGHT) as engine:
        plain = Load(engine).join()
        engine.flush_cache()
        with engine.debugger() as debugger:
            debugger.pause()
            load = Load(engine)
            for _ in range(60):
                debugger.step()
            for _ in range(30):
                debugger.step("decision")
        assert load.join() == plain
        assert engine.recording().check() == []


@pytest.mark.slow
def test_processes_need_the_setting_and_take_texts_only() -> None:
    with (
        Engine("tiny-llama", mode="processes", **TIGHT) as engine,
        pytest.raises(ConfigError, match="enable_debugger"),
    ):
        engine.debugger()
    with Engine("tiny-llama", mode="processes", enable_debugger=True, **TIGHT) as engine:
        plain = Load(engine).join()
        with engine.debugger() as debugger:
            with pytest.raises(BadRequest, match="works in mode='threads' only"):
                debugger.breakpoints.add(lambda event: True)
            debugger.breakpoints.add("planned")
            load = Load(engine)
            where = debugger.wait()
            eventually(lambda: of_scheduler(engine)[-1].seq == where.seq)
            assert of_scheduler(engine)[-1] == where.event
            assert debugger.back("decision").count > 0
        assert load.join() == plain
        assert prompt(0) and engine.recording().check() == []
