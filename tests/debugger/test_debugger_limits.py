"""Limits changed at a stop: they take effect, they are recorded, and wrong ones are refused whole."""

from __future__ import annotations

import pytest
from debug_tools import GREEDY, TIGHT, Load, of_scheduler

from sgviz.engine import Engine
from sgviz.errors import BadRequest


def test_fewer_running_requests_take_effect_and_are_recorded(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    rows = engine.pipeline.scheduler_info.max_running_requests
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
        debugger.set_limits(chunked_prefill_size=16)


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
