"""Tables, journeys, stages, live recordings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from recording_checks import assert_batches_consistent, assert_journey_complete, assert_requests_consistent
from synthetic import START_NS, SyntheticRun

from sgviz.errors import NotFound
from sgviz.events import RingSink, end_to_end_ns
from sgviz.events.schema import (
    AnyBody,
    BatchPlanned,
    Event,
    OutputStreamed,
    ProcessStarted,
    QueueEntered,
    RequestAborted,
    RequestConverted,
    RequestFinished,
    RequestReceived,
    RequestTokenized,
    ResponseFinished,
)
from sgviz.recording import PhaseName, Recording, load
from sgviz.recording.tables import EVENT_COLUMNS, ITERATION_COLUMNS, KV_COLUMNS


@pytest.fixture(scope="module")
def run() -> SyntheticRun:
    return SyntheticRun(24, seed=1, total=320, gap_us=2_000)


@pytest.fixture(scope="module")
def rec(run: SyntheticRun) -> Recording:
    return Recording(run.events)


def events_at(*stamped: tuple[int, str, AnyBody]) -> list[Event]:
    """Events of one request by hand: (ms, component, body)."""
    seqs: dict[str, int] = {}
    out = []
    for ms, component, body in stamped:
        seqs[component] = seqs.get(component, 0) + 1
        out.append(Event(seqs[component], START_NS + ms * 1_000_000, component, 0, body))
    return out


def received(rid: str, type_: str = "ChatCompletionRequest") -> RequestReceived:
    return RequestReceived(rid=rid, type=type_, path="/x", stream=False, model="m", messages=0, chars=3)


def converted(rid: str) -> RequestConverted:
    return RequestConverted(
        rid=rid, prompt_kind="text", size=3, max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=-1
    )


def finished(rid: str, reason: str = "length") -> RequestFinished:
    return RequestFinished(
        rid=rid, reason=reason, matched="", prompt_tokens=3, completion_tokens=0, cached_tokens=0
    )


def test_everything_is_consistent(rec: Recording) -> None:
    assert_requests_consistent(rec)
    assert_batches_consistent(rec)
    for rid in rec.rids:
        assert_journey_complete(rec, rid)


def test_columns_and_rows(rec: Recording, run: SyntheticRun) -> None:
    assert tuple(rec.events.columns) == EVENT_COLUMNS and len(rec.events) == len(run.events) == len(rec)
    assert (
        tuple(rec.iterations.columns) == (*ITERATION_COLUMNS, "dp_rank") and len(rec.iterations) == run.bids
    )
    assert tuple(rec.kv.columns) == (*KV_COLUMNS, "dp_rank")
    assert len(rec.requests) == 24 and list(rec.requests.rid) == rec.rids
    assert rec.events.t_ms.iloc[0] == 0 and rec.t0 == run.events[0].t and rec.t_end == run.events[-1].t


def test_empty_recording_has_all_tables() -> None:
    rec = Recording([])
    tables = (rec.events, rec.requests, rec.iterations, rec.batches, rec.kv)
    assert all(table.empty and len(table.columns) for table in tables)
    assert rec.check() == [] and rec.rids == [] and rec.dropped == 0


def test_requests_table_says_what_the_engine_said(rec: Recording, run: SyntheticRun) -> None:
    ends = {event.body.rid: event.body for event in run.events if isinstance(event.body, RequestFinished)}
    table = rec.requests.set_index("rid")
    for rid, body in ends.items():
        row = table.loc[rid]
        assert row.prompt_tokens == body.prompt_tokens and row.cached_tokens == body.cached_tokens
        assert row.completion_tokens == body.completion_tokens == rec.request(rid).sampled
        assert (row.finish_reason, row.status) == ("length", 200)
    assert table.retractions.sum() == (rec.events.kind == "request.retracted").sum() > 0


def test_retracted_request_queues_twice(rec: Recording) -> None:
    rid = rec.requests.set_index("rid").retractions.idxmax()
    phases = [phase.name for phase in rec.request(rid).phases]
    assert phases.count(PhaseName.QUEUE) == 1 + rec.request(rid).retractions
    stays = sum(phase.end - phase.start for phase in rec.request(rid).phases if phase.name is PhaseName.QUEUE)
    assert stays == rec.time_stats(rid).queue_ns


def test_cached_tokens_of_batches_are_those_of_their_admissions(rec: Recording) -> None:
    admitted = rec.events[rec.events.kind == "admit.ok"].detail.str.extract(r"prefix=(\d+)")[0].astype(int)
    assert rec.iterations.cached_tokens.sum() == admitted.sum() > 0
    assert (rec.iterations[rec.iterations["mode"] == "decode"].cached_tokens == 0).all()


def test_device_and_gap_times(rec: Recording) -> None:
    table = rec.iterations
    assert table.gap_ms.isna().sum() == 1 and pd.isna(table.gap_ms.iloc[0])
    assert (table.device_ms - (table.end_ms - table.start_ms)).abs().max() < 1e-9
    assert (table.gap_ms.iloc[1:] - (table.start_ms - table.end_ms.shift()).iloc[1:]).abs().max() < 1e-9


def test_stages_add_up_to_the_whole(rec: Recording) -> None:
    for rid in rec.rids:
        stats = rec.time_stats(rid)
        assert sum(stage.duration_ns for stage in rec.stages(rid)) == end_to_end_ns(stats)
        assert end_to_end_ns(stats) == stats.response_sent - stats.created


def test_unstreamed_first_token_is_the_schedulers(rec: Recording) -> None:
    table = rec.requests.set_index("rid")
    for rid in rec.rids:
        stats = rec.time_stats(rid)
        first = stats.first_token if table.stream[rid] else stats.prefill_finished
        assert table.ttft_ms[rid] == pytest.approx((first - stats.created) / 1e6)


def test_journey_holds_pids_and_facts(rec: Recording) -> None:
    steps = {step.type: step for step in rec.journey("req-003")}
    assert steps["ChatCompletionRequest"].pid == 100 and steps["BatchStrOutput"].pid == 103
    assert steps["ScheduleBatch"].holds["bid"] == steps["GenerationBatchResult"].holds["bid"]
    prompt = rec.requests.set_index("rid").prompt_tokens["req-003"]
    assert steps["Req"].holds["origin_input_ids"] == f"{prompt} tokens"


def test_native_request_makes_one_step_of_two_events() -> None:
    rec = Recording(events_at((0, "http", received("r", "GenerateReqInput")), (1, "http", converted("r"))))
    (step,) = rec.journey("r")
    assert step.type == "GenerateReqInput" and step.t_ms == 0 and {"path", "prompt"} <= step.holds.keys()


def test_events_of_one_request(rec: Recording) -> None:
    table = rec.events_of("req-005")
    assert set(table.rid) <= {"", "req-005"}
    assert {"request.received", "batch.planned", "pool.taken", "text.emitted"} <= set(table.kind)


def test_unknown_rid_is_named_with_a_near_one(rec: Recording) -> None:
    for look in (rec.request, rec.journey, rec.stages, rec.time_stats, rec.events_of):
        with pytest.raises(NotFound, match=r"'req-00l' among the 24 .*did you mean 'req-0"):
            look("req-00l")


def test_tables_are_copies(rec: Recording) -> None:
    table = rec.requests
    table.loc[:, "rid"] = "spoilt"
    assert list(rec.requests.rid) == rec.rids


# ---------------------------------------------------------------- lives that end otherwise


def test_request_without_a_token_has_no_first_token() -> None:
    plan = BatchPlanned(
        bid=1, mode="extend", rids=("r",), extend_lens=(3,), prefix_lens=(0,), running=0, waiting=0,
        kv_free=0, kv_evictable=0, kv_protected=0, new_token_ratio=1.0,
    )  # fmt: skip
    entered = QueueEntered(rid="r", position=0, prompt_tokens=3, max_new_tokens=0, stream=False)
    rec = Recording(
        events_at(
            (0, "http", received("r")),
            (1, "tokenizer_manager", RequestTokenized(rid="r", prompt_tokens=3)),
            (2, "scheduler", entered),
            (5, "scheduler", plan),
            (9, "scheduler", OutputStreamed(rids=("r",), tokens=(0,), finished=(True,))),
            (10, "tokenizer_manager", finished("r")),
        )
    )
    row = rec.requests.iloc[0]
    assert pd.isna(row.ttft_ms) and pd.isna(row.tpot_ms) and row.e2e_ms == 10
    assert (row.prefill_forward_ms, row.decode_ms) == (4, 0)
    assert_requests_consistent(rec)


def test_abort_while_waiting_ends_the_queue_phase() -> None:
    entered = QueueEntered(rid="r", position=0, prompt_tokens=3, max_new_tokens=4, stream=False)
    rec = Recording(
        events_at(
            (0, "http", received("r")),
            (2, "scheduler", entered),
            (7, "scheduler", RequestAborted(rid="r", where="waiting", why="gone")),
            (8, "tokenizer_manager", finished("r", "abort")),
            (9, "http", ResponseFinished(rid="r", status=499)),
        )
    )
    phases = [(phase.name.value, (phase.end - phase.start) // 1_000_000) for phase in rec.request("r").phases]
    assert phases == [("tokenize", 2), ("queue", 5), ("output", 2)]
    assert rec.requests.iloc[0].abort == "waiting: gone" and rec.requests.iloc[0].status == 499


def test_parts_of_a_request_know_their_parent() -> None:
    parts = [f"r_{number}_{'0123456789abcdef' * 2}" for number in range(2)]
    tokenized = [(3, "tokenizer_manager", RequestTokenized(rid=rid, prompt_tokens=3)) for rid in parts]
    stranger = (4, "tokenizer_manager", RequestTokenized(rid="other_7", prompt_tokens=3))
    rec = Recording(events_at((0, "http", received("r")), (1, "http", converted("r")), *tokenized, stranger))
    assert rec.request("r").children == parts
    assert list(rec.requests.parent) == ["", "r", "r", ""]
    assert rec.time_stats(parts[0]).created == START_NS
    assert rec.journey(parts[1])[0].type == "ChatCompletionRequest"


def test_rid_used_again_keeps_its_earlier_life() -> None:
    once = [(0, "http", received("r")), (5, "tokenizer_manager", finished("r"))]
    again = [(20, "http", received("r")), (28, "tokenizer_manager", finished("r"))]
    rec = Recording(events_at(*once, *again))
    assert dict(zip(rec.requests.rid, rec.requests.e2e_ms)) == {"r#1": 5.0, "r": 8.0}


# ---------------------------------------------------------------- live, saved, opened


def test_live_recording_follows_and_freezes(run: SyntheticRun) -> None:
    ring = RingSink()
    calls = []

    def snapshot() -> list[Event]:
        calls.append(1)
        return ring.snapshot()

    rec = Recording.live(snapshot, total=lambda: ring.total, dropped=lambda: ring.dropped)
    assert rec.requests.empty and rec.rids == []
    half = len(run.events) // 2
    ring.extend(run.events[:half])
    frozen = rec.freeze()
    assert len(rec.events) == half
    made = len(calls)
    assert len(rec.kv) and len(rec.iterations) and len(calls) == made  # nothing came: no new snapshot
    ring.extend(run.events[half:])
    assert len(rec.events) == len(run.events) and len(frozen.events) == half
    assert rec.requests.equals(Recording(run.events).requests)


def test_live_recording_of_a_small_ring_says_what_it_lost(run: SyntheticRun, tmp_path: Path) -> None:
    ring = RingSink(capacity=400)
    ring.extend(run.events)
    rec = Recording.live(ring.snapshot, dropped=lambda: ring.dropped)
    assert rec.dropped == len(run.events) - 400 and rec.check() == []
    rec.save(tmp_path / "run.sgv")
    assert load(tmp_path / "run.sgv").dropped == rec.dropped


def test_saved_recording_gives_the_same_tables(rec: Recording, tmp_path: Path) -> None:
    rec.save(tmp_path / "run.sgv")
    again = load(tmp_path / "run.sgv")
    for name in ("events", "requests", "iterations", "batches", "kv"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(rec, name))
    started = [event.body for event in rec._events if isinstance(event.body, ProcessStarted)]
    assert [(a.component, a.pid) for a in again.header.anchors] == [(b.component, b.pid) for b in started]
    assert again.header.configured is not None and again.source == "run.sgv"


def test_opening_a_recording_imports_no_torch(rec: Recording, tmp_path: Path) -> None:
    rec.save(tmp_path / "run.sgv")
    code = (
        "import sys, sgviz.recording as r\n"
        "from sgviz.viz.terminal import journey_table\n"
        f"rec = r.load({str(tmp_path / 'run.sgv')!r})\n"
        "assert len(rec.requests) == 24\n"
        "heavy = {'torch', 'transformers', 'zmq', 'sgviz.scheduler', 'sgviz.batch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_reading_wing_works_where_the_engine_s_packages_are_missing(
    rec: Recording, tmp_path: Path
) -> None:
    """torch, transformers, pyzmq, fastapi and the like cannot be imported; everything that reads still works."""
    rec.save(tmp_path / "run.sgv")
    code = (
        "import sys\n"
        "for name in 'torch transformers zmq fastapi uvicorn starlette tokenizers safetensors'.split():\n"
        "    sys.modules[name] = None\n"
        "import sgviz\n"
        "from sgviz.__main__ import main\n"
        "from sgviz.viz.report import report_html\n"
        "from sgviz.viz.diff_figure import diff_figure\n"
        f"path, out = {str(tmp_path / 'run.sgv')!r}, {str(tmp_path)!r}\n"
        "rec = sgviz.load(path)\n"
        "assert sum(part.duration_ns for part in rec.explain(rec.rids[0]).parts) > 0\n"
        "assert rec.audit().balanced and rec.diff(rec).first is None\n"
        "assert rec.at().idle and rec.why_not_running().empty and len(rec.tokens) and len(rec.decisions)\n"
        "diff_figure(rec.diff(rec))\n"
        "for to in ('perfetto', 'otel', 'csv', 'parquet'):\n"
        "    rec.export(to, out + '/' + to)\n"
        "assert report_html(rec).startswith('<!doctype html>')\n"
        "assert main(['explain', path, rec.rids[0]]) == 0 and main(['diff', path, path]) == 0\n"
        "assert main(['report', path]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
