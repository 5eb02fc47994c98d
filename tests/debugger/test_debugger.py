"""The debugger on an engine in threads: where it stops, what it shows, what it changes, and that it always lets go."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
from debug_tools import GREEDY, TIGHT, Load, Moody, eventually, kinds, of_scheduler, prompt

from sgviz.debugger import Debugger
from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, NotFound, Unavailable
from sgviz.events import Event
from sgviz.scheduler.gate.vocabulary import DECISIONS, KINDS

SPECIAL = {"policy.failed", "cache.flushed", "limits.changed", "request.aborted", "loop.idle"}


@pytest.fixture(scope="module")
def moody() -> Moody:
    return Moody()


@pytest.fixture(scope="module")
def engine(moody: Moody) -> Iterator[Engine]:
    with Engine("tiny-llama", schedule_policy=moody, **TIGHT) as running:
        yield running


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, list[int]]:
    """What the load gives when nobody debugs."""
    return Load(engine).join()


@pytest.fixture(autouse=True)
def at_rest(engine: Engine) -> Iterator[None]:
    yield
    eventually(lambda: engine.internal_state()["num_live_reqs"] == 0)
    assert not engine.internal_state()["parked"]


# ---------------------------------------------------------------- where it stops


def provoke(engine: Engine, moody: Moody, debugger: Debugger, kind: str) -> Load | None:
    """Do what makes an event of that kind happen."""
    if kind == "cache.flushed":
        engine.pipeline.loop.submit(engine.pipeline.manager.flush_cache())
    if kind == "limits.changed":
        debugger.pause()
        debugger.set_limits(chunked_prefill_size=32)
        debugger.continue_()
    if kind in ("cache.flushed", "limits.changed"):
        return None
    moody.moody = kind == "policy.failed"
    load = Load(engine)
    if kind == "request.aborted":
        eventually(lambda: "r3" in engine.pipeline.manager.rid_to_state)
        engine.abort("r3")
    return load


@pytest.mark.parametrize("kind", KINDS)
def test_a_breakpoint_on_a_kind_stops_exactly_at_its_first_event(
    engine: Engine, plain: dict[str, list[int]], moody: Moody, kind: str
) -> None:
    with engine.debugger() as debugger:
        before = debugger.pause().seq
        debugger.continue_()
        number = debugger.breakpoints.add(kind)
        load = provoke(engine, moody, debugger, kind)
        where = debugger.wait()
        time.sleep(0.05)  # were it running, it would emit
        events = of_scheduler(engine, before)
        first = next(event for event in events if event.kind == kind)
        assert where.event == first and where.seq == first.seq
        assert events[-1] == first, f"after it came {kinds(events[events.index(first) + 1 :])}"
        assert where.iteration == first.iteration and f"breakpoint {number}" in where.why
        assert len(where.decided) == 1 and where.decided[0]
        moody.moody = False
    if load is not None:
        ended = load.join()
        cut = {"r3"} if kind == "request.aborted" else set()
        assert {rid: ids for rid, ids in ended.items() if rid not in cut} == {
            rid: ids for rid, ids in plain.items() if rid not in cut
        }


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


# ---------------------------------------------------------------- what it shows


def test_what_is_shown_is_the_engine_s_own_state(engine: Engine) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 12)
        debugger.run("refused")
        moment = engine.recording().at()
        assert tuple(view.rid for view in debugger.waiting) == moment.waiting
        assert {view.rid for view in debugger.running} == set(moment.running)
        pools = debugger.pools
        assert (pools.total, pools.free, pools.evictable) == (moment.total, moment.free, moment.evictable)
        assert (pools.protected, pools.private, pools.moving) == (moment.protected, moment.private_total, 0)
        assert {node.node: (node.parent, node.tokens, node.locks) for node in debugger.tree} == {
            node.node: (node.parent, node.tokens, node.locks) for node in moment.tree
        }
        for view in (
            debugger.waiting,
            debugger.running,
            debugger.adder,
            pools,
            debugger.tree,
            debugger.batches,
        ):
            assert repr(view).startswith("<")
    load.join()


def test_the_adder_s_budgets_are_those_of_the_verdict(engine: Engine) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 12)
        for _ in range(6):
            verdict = debugger.run("admitted").event.body
            adder = debugger.adder
            assert adder.planning and adder.can_run[-1] == verdict.rid
            assert (adder.rem_total, adder.rem_input) == (verdict.rem_total, verdict.rem_input)
            assert adder.rem_chunk == (None if verdict.rem_chunk == -1 else verdict.rem_chunk)
        told = debugger.run("planned")
        adder = debugger.adder
        assert not adder.planning and adder.iteration <= told.iteration
    load.join()


def test_a_request_is_shown_as_every_type_that_holds_it(engine: Engine) -> None:
    with engine.debugger() as debugger:
        load = Load(engine, count=2, tokens=20)
        debugger.run("processed and iteration > 0")
        debugger.run('sampled and "r1" in rids')
        types = {view.type: view for view in debugger.types("r1")}
        assert list(types)[:4] == ["GenerateReqInput", "ReqState", "Req", "SamplingParams"]
        assert {"ReqKvInfo", "ScheduleBatch"} <= set(types)
        req = types["Req"].fields
        assert req["place"] == "running" and req["max_new_tokens"] == 21
        assert types["ReqState"].fields["dispatched"] is True
        with pytest.raises(NotFound, match=r"no request 'r9' is in the scheduler.*did you mean"):
            debugger.types("r9")
    load.join()


def test_a_refusal_is_told_in_words_with_its_numbers(engine: Engine) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine)
        where = debugger.run('refused and reason == "kv"')
        body = where.event.body
        (words,) = where.decided
        assert words.startswith(
            f"{body.rid} was refused (kv): it needs {body.need} KV tokens, {body.have} are to be had"
        )
        assert all(f"{rid} holds {amount}" in words for rid, amount in body.holders[:6])
    load.join()


def test_stepping_back_shows_the_recorded_states(engine: Engine) -> None:
    with engine.debugger() as debugger:
        load = Load(engine)
        debugger.run("processed and iteration > 0")
        for _ in range(5):
            debugger.step("iteration")
        here = debugger.pause()
        iterations = [debugger.back("iteration").iteration for _ in range(3)]
        assert iterations == [here.iteration - 2, here.iteration - 3, here.iteration - 4] or iterations == [
            here.iteration - 1, here.iteration - 2, here.iteration - 3,
        ]  # fmt: skip
        back = debugger.back("decision")
        events = engine.recording().stamped()
        assert events[back.count - 1].kind in DECISIONS
        assert back == engine.recording().at(count=back.count)
        assert debugger.forward("event", 10**6).count == len(events)
        debugger.continue_()
        with pytest.raises(Unavailable, match="running"):
            debugger.back()
    load.join()


# ---------------------------------------------------------------- what it changes


def test_fewer_running_requests_take_effect_and_are_recorded(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    rows = engine.pipeline.infos["scheduler"].max_running_requests
    with engine.debugger() as debugger:
        where = debugger.pause()
        debugger.set_limits(max_running_requests=2)
        assert debugger.limits.pending == {"max_running_requests": 2}
        debugger.continue_()
        assert Load(engine).join() == plain
        plans = [event.body for event in of_scheduler(engine, where.seq) if event.kind == "batch.planned"]
        assert max(len(plan.rids) for plan in plans) == 2
        changed = next(
            event.body for event in of_scheduler(engine, where.seq) if event.kind == "limits.changed"
        )
        assert changed.max_running_requests == 2
        debugger.pause()
        for value in (0, rows + 1):
            with pytest.raises(BadRequest, match=f"not between 1 and {rows}"):
                debugger.set_limits(max_running_requests=value)
        debugger.set_limits(max_running_requests=rows)


def test_a_smaller_chunk_takes_effect_also_when_changed_inside_a_plan(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine)
        where = debugger.run("admitted")  # in the middle of a plan: its budgets stay
        debugger.set_limits(chunked_prefill_size=8)
        told = debugger.run("limits.changed")
        assert told.event.body.chunked_prefill_size == 8 and told.seq > where.seq
        debugger.continue_()
        assert load.join() == plain
        plans = [event.body for event in of_scheduler(engine, told.seq) if event.kind == "batch.planned"]
        assert max(sum(plan.extend_lens) for plan in plans if plan.mode == "extend") == 8
        debugger.pause()
        with pytest.raises(BadRequest, match="-1 means: never cut"):
            debugger.set_limits(chunked_prefill_size=0)
        debugger.set_limits(chunked_prefill_size=32)


def test_the_policy_is_changed_by_a_built_in_name_only(engine: Engine, plain: dict[str, list[int]]) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        for name in ("os:getcwd", "evil.py:Policy"):
            with pytest.raises(BadRequest, match="no code is loaded"):
                debugger.set_limits(schedule_policy=name)
        with pytest.raises(BadRequest, match="not one of fcfs"):
            debugger.set_limits(schedule_policy="fcsf")
        debugger.set_limits(schedule_policy="lof")
        start = debugger.step().seq
        assert debugger.limits.schedule_policy == "lof"
        debugger.continue_()
        assert Load(engine).join() == plain
        sorted_by = {
            event.body.policy for event in of_scheduler(engine, start) if event.kind == "queue.sorted"
        }
        assert sorted_by == {"lof"}


def test_limits_are_changed_at_a_stop_only_and_all_or_none(engine: Engine) -> None:
    with engine.debugger() as debugger:
        with pytest.raises(BadRequest, match="pause first"):
            debugger.set_limits(max_running_requests=3)
        debugger.pause()
        with pytest.raises(BadRequest):
            debugger.set_limits(max_running_requests=3, chunked_prefill_size=0)
        with pytest.raises(BadRequest, match="name a limit"):
            debugger.set_limits()
        assert debugger.limits.pending == {}


@pytest.mark.parametrize("page_size", [1, 16])
def test_less_memory_takes_effect_and_the_books_still_balance(page_size: int) -> None:
    with Engine("tiny-llama", **{**TIGHT, "page_size": page_size, "max_total_tokens": 512}) as engine:
        plain = Load(engine).join()
        with engine.debugger() as debugger:
            debugger.pause()
            load = Load(engine)
            debugger.run("processed and iteration > 0", timeout=10)
            debugger.run("planned and waiting < 4")
            least = 160
            with pytest.raises(BadRequest, match="can only go down from 512"):
                debugger.set_limits(max_total_tokens=1024)
            with pytest.raises(BadRequest, match="what the largest live request needs"):
                debugger.set_limits(max_total_tokens=page_size * 2)
            debugger.set_limits(max_total_tokens=least)
            debugger.run("limits.changed")
            assert debugger.limits.max_total_tokens + debugger.pools.free <= 512
            debugger.continue_()
            assert load.join() == plain
            debugger.pause()
            assert debugger.pools.total == debugger.pools.free + debugger.pools.evictable == least
            assert debugger.limits.to_retire == 0
        assert engine.internal_state()["max_total_num_tokens"] == least
        assert Load(engine, name="again").join() == {f"again{rid[1:]}": ids for rid, ids in plain.items()}
        recording = engine.recording()
        assert recording.check() == [] and recording.at().total == least
        with pytest.raises(BadRequest, match="fit"):
            engine.generate(input_ids=[1] * 170, sampling_params={**GREEDY, "max_new_tokens": 2})


# ---------------------------------------------------------------- letting go


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
    assert {rid: reason for rid, reason in load.reasons.items()} == dict.fromkeys(load.join(), "length")
    debugger.close()


def test_requests_and_aborts_wait_in_order_while_parked(engine: Engine, plain: dict[str, list[int]]) -> None:
    with engine.debugger() as debugger:
        debugger.pause()
        load = Load(engine)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == 12)
        engine.abort("r5")
        state = engine.internal_state()
        assert state["parked"] and state["num_live_reqs"] == 0
        assert engine.pipeline.loop.call(engine.pipeline.manager.health_generate(1.0))
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
            debugger.breakpoints.add("refused")
            load = Load(engine)
            where = debugger.wait()
            eventually(lambda: of_scheduler(engine)[-1].seq == where.seq)
            assert of_scheduler(engine)[-1] == where.event
            assert debugger.back("decision").count > 0
        assert load.join() == plain
        assert prompt(0) and engine.recording().check() == []
