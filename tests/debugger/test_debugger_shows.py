"""What the debugger shows at a stop is what the engine is, now and before."""

from __future__ import annotations

import pytest
from debug_tools import Load, eventually

from sgviz.engine import Engine
from sgviz.errors import NotFound, Unavailable
from sgviz.scheduler.gate.vocabulary import DECISIONS


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
        with pytest.raises(NotFound, match=r"no request 'r9' is in the scheduler; \d are"):
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
