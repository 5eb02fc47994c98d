"""Decisions with their repeats folded, tokens with their ways, waits by cause: against the engine and each other."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest
from random_runs import run
from recording_checks import assert_recording_sound
from synthetic import SyntheticRun
from timed_rig import TimedRig
from workload import crowd

from sgviz.recording import Cause, Recording
from sgviz.recording.decisions import DECISION_COLUMNS, TOKEN_COLUMNS
from sgviz.scheduler.prefill_adder import PrefillAdder, Refused


@pytest.fixture(scope="module")
def pressed() -> TimedRig:
    config: dict[str, object] = {
        "tokens": 192,
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.001,
    }
    return run(config, crowd(3))[0]


def test_refusals_are_counted_as_often_as_the_adder_said_no(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[tuple[str, str], list[tuple[int, int]]] = {}
    real = PrefillAdder.add_one_req

    def spy(self: PrefillAdder, *args: object, **options: object) -> object:
        verdict = real(self, *args, **options)  # type: ignore[arg-type]
        if isinstance(verdict, Refused):
            said.setdefault((verdict.req.rid, str(verdict.reason)), []).append((verdict.need, verdict.have))
        return verdict

    monkeypatch.setattr(PrefillAdder, "add_one_req", spy)
    rig, _ = run({"tokens": 192, "chunked_prefill_size": 16, "schedule_conservativeness": 0.001}, crowd(3))
    table = rig.recording().decisions
    refused = table[table.verdict == "refused"]
    assert said and refused["count"].max() > 1
    counts = refused.groupby(["rid", "reason"])["count"].sum().to_dict()
    assert counts == {key: len(numbers) for key, numbers in said.items()}
    for key, numbers in said.items():
        rows = refused[(refused.rid == key[0]) & (refused.reason == key[1])]
        assert (rows.need.iloc[0], rows.have.iloc[0]) == numbers[0]
        assert (rows.last_need.iloc[-1], rows.last_have.iloc[-1]) == numbers[-1]
    assert (table.last_ms >= table.first_ms).all()


def test_every_admission_and_retraction_has_its_row(pressed: TimedRig) -> None:
    rec = pressed.recording()
    table = rec.decisions
    kinds = rec.events.kind
    assert tuple(table.columns) == (*DECISION_COLUMNS, "dp_rank")
    assert (table.verdict == "admitted").sum() == (kinds == "admit.ok").sum() > 0
    assert (table.verdict == "retracted").sum() == (kinds == "request.retracted").sum() > 0
    kv = table[(table.reason == "kv") & (table.verdict == "refused")]
    assert len(kv) and (kv.need >= kv.have).all() and kv.holders.map(bool).all()


def test_tokens_are_those_sampled_each_with_its_way() -> None:
    rec = Recording(SyntheticRun(20, seed=1, total=320, gap_us=2_000).events)
    table = rec.tokens
    assert tuple(table.columns) == (*TOKEN_COLUMNS, "dp_rank")
    assert len(table) == rec.batches.token.notna().sum()
    assert (table.groupby("rid").size() == rec.requests.set_index("rid").completion_tokens).all()
    stages = ["sampled_ms", "streamed_ms", "detokenized_ms", "received_ms", "sent_ms"]
    assert table[stages].notna().all().all()
    for before, after in itertools.pairwise(stages):
        assert (table[before] <= table[after]).all(), (before, after)
    by_rid = table.groupby("rid")
    assert all(list(part["index"]) == list(range(len(part))) for _, part in by_rid)
    rids = rec.requests[rec.requests.stream.astype(bool)].rid
    first = table[table["index"] == 0].set_index("rid").received_ms
    ttft = rec.requests.set_index("rid")
    assert ((first[rids] - ttft.arrival_ms[rids]) - ttft.ttft_ms[rids]).abs().max() < 1e-6


def test_waits_add_up_in_both_tables(pressed: TimedRig) -> None:
    rec = pressed.recording()
    waits = rec.waits.set_index("rid")
    causes = [f"{cause}_ms" for cause in Cause]
    assert (waits[causes].sum(axis=1) - waits.total_ms).abs().max() < 1e-6
    requests = rec.requests.set_index("rid")
    columns = [name for name in requests if name.startswith("wait_")]
    assert ((requests[columns].sum(axis=1) - requests.queue_ms.fillna(0)).abs() < 1e-6)[
        requests.abort == ""
    ].all()
    assert requests.wait_retraction_ms.sum() > 0 and requests.wait_head_of_line_ms.sum() > 0


def test_owners_hold_what_the_pool_says(pressed: TimedRig) -> None:
    rec = pressed.recording()
    owners = rec.kv_owners
    for count, part in owners.groupby("count"):
        moment = rec.at(count=count)
        assert part.tokens.sum() == moment.total - moment.free
        private = part[~part.owner.str.startswith("(")].set_index("owner").tokens.to_dict()
        assert private == moment.private
    assert {"(tree, locked)", "(tree, unlocked)"} < set(owners.owner)


def test_everything_of_an_empty_recording_is_an_empty_table() -> None:
    rec = Recording([])
    for table in (rec.decisions, rec.tokens, rec.waits, rec.kv_owners, rec.why_not_running()):
        assert isinstance(table, pd.DataFrame) and table.empty and len(table.columns)
    assert rec.audit().balanced and rec.at().waiting == ()


def test_a_real_scheduler_s_recording_is_sound(pressed: TimedRig) -> None:
    assert_recording_sound(pressed.recording())


def test_admissions_say_node_and_piece(pressed: TimedRig) -> None:
    rec = pressed.recording()
    admitted = rec.decisions[rec.decisions.verdict == "admitted"]
    pieces = admitted[admitted.chunk_end.notna()]
    assert len(pieces) == (rec.events.kind == "chunk.cut").sum() > 0
    assert (pieces.chunk_end == pieces.prefix + pieces.extend).all() and (
        pieces.chunk_end <= pieces.chunk_total
    ).all()
    assert admitted.node.notna().sum() == (rec.events.kind == "prefix.matched").sum() > 0


def test_a_policy_that_fails_is_a_decision_too() -> None:
    class Broken:
        name = "broken"

        def order(self, waiting: object, view: object) -> object:
            raise RuntimeError("no idea")

    rig = TimedRig(policy=Broken())
    rig.submit(range(8), 4)
    rig.run()
    table = rig.recording().decisions
    failed = table[table.verdict == "policy failed"]
    assert len(failed) and "no idea" in failed.reason.iloc[0]
