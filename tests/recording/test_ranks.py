"""Recordings of several schedulers: a whole engine of two ranks with a mock device, read as one and by rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest, NotFound
from sgviz.events.schema import DpChose, DpRankChanged, Event, QueueEntered, TextEmitted
from sgviz.recording import Cause, Recording, load
from sgviz.recording.rank_split import rank_of

PROMPTS = [f"request number {n} " * (1 + n % 5) for n in range(12)]
PARAMS = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        model="tiny-llama", device="mock", dp_size=2, mock_step_ms=1.0, load_balance_method="total_tokens"
    ) as engine:
        engine.generate(PROMPTS, PARAMS)
        yield engine


@pytest.fixture(scope="module")
def rec(engine: Engine) -> Recording:
    return engine.recording().freeze()


def test_every_event_of_a_scheduler_is_in_its_rank_and_no_other(rec: Recording) -> None:
    assert rec.ranks == (0, 1)
    for rank in rec.ranks:
        whole = [(e.seq, e.t, e.kind) for e in rec.stamped() if rank_of(e.component) == rank]
        mine = [(e.seq, e.t, e.kind) for e in rec.rank(rank).stamped() if e.component == "scheduler"]
        assert mine == whole
        assert whole


def test_requests_are_where_the_controller_sent_them(rec: Recording) -> None:
    chosen = {event.body.rid: event.body.rank for event in rec.stamped() if isinstance(event.body, DpChose)}
    table = rec.requests.dropna(subset=["dp_rank"]).set_index("rid")
    assert {rid: table.dp_rank[rid] for rid in chosen} == chosen
    assert set(chosen.values()) == {0, 1}
    for rank in rec.ranks:
        assert set(rec.rank(rank).rids) >= {rid for rid, at in chosen.items() if at == rank}
        assert not set(rec.rank(rank).rids) & {rid for rid, at in chosen.items() if at != rank}


def test_nothing_is_lost_by_the_split(rec: Recording) -> None:
    assert not rec.missing and not rec.dropped
    for rank in rec.ranks:
        assert not rec.rank(rank).missing and not rec.rank(rank).dropped
    assert rec.audit().balanced and rec.audit().audited == len(rec)
    assert rec.check() == []


def test_tables_of_the_whole_are_those_of_the_ranks(rec: Recording) -> None:
    for name in ("iterations", "batches", "kv", "decisions", "tokens", "waits"):
        whole = getattr(rec, name)
        for rank in rec.ranks:
            mine = whole[whole.dp_rank == rank].drop(columns="dp_rank").reset_index(drop=True)
            part = getattr(rec.rank(rank), name).drop(columns="dp_rank")
            if name != "waits":
                pd.testing.assert_frame_equal(mine, part, check_dtype=False)
            assert len(mine) == len(part) > 0


def test_explanations_are_whole_and_say_why_that_rank(rec: Recording) -> None:
    chosen = {event.body.rid: event for event in rec.stamped() if isinstance(event.body, DpChose)}
    for rid, event in chosen.items():
        explanation = rec.explain(rid)
        at = explanation.start_ns
        for part in explanation.parts:
            assert part.start_ns == at
            at = part.end_ns
        assert at - explanation.start_ns == explanation.total_ns
        mine = [part for part in explanation.parts if part.cause is Cause.CONTROLLER]
        assert len(mine) == 1 and mine[0].end_ns <= event.t
        assert f"rank {event.body.rank} by total_tokens" in mine[0].detail
        assert "rank 0: " in mine[0].detail and "rank 1: " in mine[0].detail


def test_one_of_the_ranks_must_be_named_for_what_each_has_alone(rec: Recording) -> None:
    with pytest.raises(BadRequest, match="2 schedulers"):
        rec.at()
    with pytest.raises(NotFound, match="no rank 2"):
        rec.rank(2)
    assert not rec.rank(1).at().waiting


def test_saved_whole_and_by_rank(rec: Recording, tmp_path: Path) -> None:
    rec.save(tmp_path / "whole.sgv")
    again = load(tmp_path / "whole.sgv")
    assert again.ranks == (0, 1)
    pd.testing.assert_frame_equal(again.requests, rec.requests)
    rec.rank(1).save(tmp_path / "one.sgv")
    one = load(tmp_path / "one.sgv")
    assert one.ranks == (0,) and not one.missing
    assert list(one.requests.rid) == list(rec.rank(1).requests.rid)
    assert one.audit().balanced and one.check() == []


def test_a_live_recording_folds_only_what_is_new(engine: Engine) -> None:
    live = engine.recording()
    assert len(live.requests) and len(live.iterations)
    folds = {rank: live.rank(rank).fold() for rank in live.ranks}
    before = len(live.requests)
    engine.generate(PROMPTS[:4], PARAMS)
    assert len(live.requests) == before + 4
    for rank in live.ranks:
        assert live.rank(rank).fold() is folds[rank]
    assert live.audit().balanced


def test_a_health_check_is_its_rank_s_and_nobody_s_request(engine: Engine) -> None:
    pipeline = engine.pipeline
    for _ in range(2):  # one a rank
        assert pipeline.loop.call(pipeline.manager.health_generate()) is None
    checked = engine.recording().freeze()
    probes = [e for e in checked.stamped() if isinstance(e.body, QueueEntered) and e.body.probe]
    assert {rank_of(event.component) for event in probes} == {0, 1}
    assert not [rid for rid in checked.rids if rid.startswith("HEALTH_CHECK")]
    for event in probes:
        mine = checked.rank(rank_of(event.component) or 0)
        assert any(isinstance(e.body, TextEmitted) and event.body.rid in e.body.rids for e in mine.stamped())
        assert checked.explain(event.body.rid).total_ns < 60e9  # else it began with the clock
    assert checked.audit().balanced and checked.check() == []


def test_a_real_loss_shows_in_the_ranks(rec: Recording) -> None:
    events = list(rec.stamped())
    at = next(
        n for n, e in enumerate(events) if e.component == "detokenizer" and isinstance(e.body, TextEmitted)
    )
    cut = Recording([*events[:at], *events[at + 1 :]], rec.header)
    assert cut.missing == {"detokenizer": 1}
    assert all(cut.rank(rank).missing == {"detokenizer": 1} for rank in cut.ranks)
    assert cut.audit().audited < len(cut)


def test_a_lost_rank_ends_its_requests(rec: Recording) -> None:
    """Cut off in the middle of its work: what it held is nobody's fault, and the other rank goes on."""
    events = list(rec.stamped())
    mine = [n for n, event in enumerate(events) if rank_of(event.component) == 1]
    at = mine[len(mine) // 2]
    kept = [e for n, e in enumerate(events) if n <= at or rank_of(e.component) != 1]
    after = next(n for n, e in enumerate(kept) if e is events[at]) + 1
    seq = max(e.seq for e in kept if e.component == "data_parallel_controller") + 1
    lost = Event(
        seq, events[at].t, "data_parallel_controller", 0, DpRankChanged(rank=1, active=False, why="killed")
    )
    cut = Recording([*kept[:after], lost, *kept[after:]], rec.header)
    held = cut.rank(1).requests
    assert (held.abort == "rank 1 was lost: killed").sum() + held.finish_reason.ne("").sum() >= len(held) > 0
    assert cut.audit().balanced, str(cut.audit())
    assert not list(cut.rank(1).at().running)
    for rid in held.rid:
        explanation = cut.explain(rid)
        assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
