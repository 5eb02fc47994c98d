"""compare on small devices: tables, pairs, accounts, closed loops and turns, on the wall clock and in virtual time."""

from __future__ import annotations

import itertools
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import sgviz
from sgviz.errors import BadRequest, ConfigError, NotFound, SgvizError
from sgviz.events import Event, RingSink
from sgviz.events.schema import AnyBody, BatchProcessed, QueueEntered, RequestFinished
from sgviz.experiment import Comparison, compare, interleave, measure, requests_of
from sgviz.experiment.comparison import ACCOUNT_SHOWN, SHOWN
from sgviz.recording import Recording
from sgviz.workload import closed_loop, multi_turn, poisson

BOTH = {"normal": {"event_loop": "normal"}, "overlap": {"event_loop": "overlap"}}
MOCK = {"model": "tiny-llama", "device": "mock", "mode": "threads", "mock_step_ms": 1.0}
MEASURES = (*SHOWN, *ACCOUNT_SHOWN)
SIM = {"model": "tiny-llama", "device": "sim:h100-sxm", "sim_model": "qwen2.5-0.5b"}
LOOP = closed_loop(concurrency=4, num_requests=12, prompt_tokens=(5, 30), output_tokens=(3, 9), seed=1)
TURNS = multi_turn(sessions=3, turns=3, question_tokens=8, output_tokens=5, seed=2)


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return compare(BOTH, LOOP, repeats=2, **MOCK)


def test_the_public_names_load_on_first_use() -> None:
    assert sgviz.experiment.compare is compare and sgviz.workload.closed_loop is closed_loop


def test_runs_go_in_turns(compared: Comparison) -> None:
    order = [(run.name, run.repeat) for run in compared.runs]
    assert order == [("normal", 0), ("overlap", 0), ("normal", 1), ("overlap", 1)]


def test_the_table_has_a_row_a_name_and_medians_of_the_repeats(compared: Comparison) -> None:
    table, every = compared.table, compared.every_run
    assert list(table.index) == ["normal", "overlap"]
    assert (table.completed == 12).all() and (table.failed == 0).all() and (table.dropped_events == 0).all()
    assert (table.total_output_tokens == LOOP.output_tokens).all()
    assert (table.total_input_tokens == LOOP.input_tokens).all()
    assert (every.max_concurrent_requests <= 4).all() and (every.iterations >= 12 * 3 / 4).all()
    assert table.loc["normal", "duration"] == pytest.approx(np.median(every.loc["normal", "duration"]))
    assert (every.output_throughput == every.total_output_tokens / every.duration).all()
    for name in ("ttft", "tpot", "itl", "e2e_latency"):
        assert (every[f"median_{name}_ms"] <= every[f"p99_{name}_ms"]).all()
    assert (compared.spread.duration >= 0).all()


def test_ratios_divide_neighbouring_runs(compared: Comparison) -> None:
    every, ratios = compared.every_run, compared.ratios("duration")
    pairs = [every.loc[("overlap", n), "duration"] / every.loc[("normal", n), "duration"] for n in (0, 1)]
    assert list(ratios.index) == ["overlap"]
    assert ratios.loc["overlap", ["low", "high"]].tolist() == [min(pairs), max(pairs)]
    assert f"{np.median(pairs):.2f} times that of normal" in compared.verdict("duration")
    assert ("noise" in compared.verdict("duration")) == (min(pairs) < 1 < max(pairs))
    assert "no difference" in compared.verdict("completed")
    with pytest.raises(NotFound, match="duration"):
        compared.ratios("duratoin")


def test_every_printed_row_has_its_unit(compared: Comparison) -> None:
    lines = str(compared).splitlines()
    rows = [line.split("  ")[0] for line in lines if line.startswith(MEASURES) and "  " in line]
    assert len(rows) == len(MEASURES)
    assert all(row.endswith(("_ms", "_s", ")")) for row in rows)
    assert "output_throughput (tokens/s)" in rows and "output_throughput (tokens/s)" in compared._repr_html_()


def test_requests_are_paired_by_rid_with_the_same_output(compared: Comparison) -> None:
    pairs = compared.requests
    assert list(pairs.index) == [request.rid for request in LOOP.requests]
    assert list(pairs.output_tokens) == [request.output_tokens for request in LOOP.requests]
    assert pairs["same_output"].all()
    assert (pairs["ttft_ms"]["normal"] <= pairs["e2e_ms"]["normal"]).all()
    assert set(pairs["e2e_ms"].columns) == {"normal", "overlap"}


def test_the_account_of_each_run_adds_up(compared: Comparison) -> None:
    table = compared.overlap_account
    wanted = {"host_hidden_s", "host_exposed_s", "device_idle_s", "device_busy_s", "hidden_share"}
    assert wanted <= set(table.columns) and list(table.index) == ["normal", "overlap"]
    for run in compared.runs:
        account = run.account
        assert account.device_idle_s == pytest.approx(account.host_exposed_s + account.handoff_s)
        assert account.missing == 0 and account.launches > 0
    assert set(compared.stages.loc["overlap", "scheduler"].index) >= {"plan", "launch", "process"}


def test_recordings_are_those_of_the_middle_repeat(compared: Comparison) -> None:
    found = compared.recordings
    assert all(isinstance(each, Recording) and each.check() == [] for each in found.values())
    throughputs = sorted(run.numbers["output_throughput"] for run in compared.runs if run.name == "overlap")
    assert measure(found["overlap"])["output_throughput"] == throughputs[0]
    assert list(requests_of(found["normal"]).index) == [request.rid for request in LOOP.requests]
    with pytest.raises(NotFound, match="overlap"):
        compared.middle("overlup")


def test_every_showing_says_where_the_numbers_come_from(compared: Comparison, tmp_path: Path) -> None:
    text = str(compared)
    for part in (
        "normal",
        "host_hidden_s",
        "12 of 12 requests",
        "clock: monotonic",
        "device mock",
        "0 events dropped",
    ):
        assert part in text
    assert "clock: monotonic" in compared._repr_html_() and "SIMULATED" not in text
    compared.save(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.sgv"))) == 4
    assert sgviz.load(tmp_path / "out" / "normal-0.sgv").rids == compared.recordings["normal"].rids
    assert sgviz.workload.load(tmp_path / "out" / "workload.json") == LOOP


def test_open_arrivals_come_when_they_are_due() -> None:
    made = poisson(rate=100, num_requests=20, prompt_tokens=8, output_tokens=2, seed=3)
    found = compare({"one": {}}, made, repeats=1, stream=True, **MOCK)
    arrivals = found.recordings["one"].requests.arrival_ms
    offsets = np.array(arrivals) - arrivals.iloc[0] - 1000 * np.array([each.at_s for each in made.requests])
    assert (offsets > -20).all()  # never before its time
    assert found.recordings["one"].requests.stream.all()


# ---------------------------------------------------------------- turns


def prompts_of(recording: Recording) -> dict[str, list[int]]:
    return {
        event.body.rid: np.frombuffer(event.body.input_ids, dtype="<i4").tolist()
        for event in recording.stamped()
        if isinstance(event.body, QueueEntered)
    }


def assert_turns_follow(recording: Recording) -> None:
    prompts, rows = prompts_of(recording), requests_of(recording)
    for request in TURNS.requests:
        assert len(prompts[request.rid]) == request.prompt_tokens
        if request.after:
            history = prompts[request.after] + list(rows.output_ids[request.after])
            assert prompts[request.rid][: len(history)] == history
            # all of it but the last sampled token has its KV in the tree
            assert rows.cached_tokens[request.rid] == len(history) - 1


def test_a_turn_carries_the_true_conversation() -> None:
    found = compare({"one": {}}, TURNS, repeats=1, **MOCK)
    assert_turns_follow(found.recordings["one"])


def test_a_turn_carries_the_true_conversation_in_virtual_time() -> None:
    found = compare(BOTH, TURNS, repeats=1, clock="virtual", host="modelled", **SIM)
    for recording in found.recordings.values():
        assert_turns_follow(recording)


# ---------------------------------------------------------------- virtual time


def test_virtual_time_gives_the_same_answers_as_the_wall_clock_and_says_what_it_is() -> None:
    wall = compare({"overlap": BOTH["overlap"]}, LOOP, repeats=1, mode="threads", **SIM)
    virtual = compare(BOTH, LOOP, repeats=2, clock="virtual", host="modelled", **SIM)
    for name in BOTH:
        outputs = requests_of(virtual.recordings[name]).output_ids
        assert dict(outputs) == dict(requests_of(wall.recordings["overlap"]).output_ids)
    assert "SIMULATED (sim:h100-sxm with qwen2.5-0.5b)" in wall.source_line()
    assert "clock: virtual" in virtual.source_line() and "host" in virtual.source_line()
    assert (virtual.every_run.max_concurrent_requests <= 4).all()


def test_a_modelled_run_is_the_same_every_time() -> None:
    found = compare(BOTH, LOOP, repeats=2, clock="virtual", host="modelled", **SIM)
    assert (found.spread == 0).all(axis=None)
    account = found.overlap_account
    assert account.loc["overlap", "host_hidden_s"] > account.loc["normal", "host_hidden_s"]
    assert account.loc["overlap", "device_idle_s"] < account.loc["normal", "device_idle_s"]


def test_a_closed_loop_sends_the_next_when_one_is_done_in_virtual_time() -> None:
    found = compare({"one": {}}, LOOP, repeats=1, clock="virtual", host="modelled", **SIM)
    rows = found.recordings["one"].requests.set_index("rid")
    arrivals = list(rows.arrival_ms.loc[[each.rid for each in LOOP.requests]])
    assert all(a <= b for a, b in pairwise(arrivals))
    ends = sorted(rows.arrival_ms + rows.e2e_ms)
    assert arrivals[3] < ends[0]
    for number, arrival in enumerate(arrivals[4:]):
        assert arrival >= ends[number]


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: compare({}, LOOP), BadRequest, "at least one run"),
        (lambda: compare(BOTH, LOOP, repeats=0), BadRequest, "repeat"),
        (lambda: compare({"a": {"page_sise": 4}}, LOOP), ConfigError, "run 'a'.*page_size"),
        (lambda: compare({"a": {"event_loop": "overlup"}}, LOOP), ConfigError, "run 'a'.*normal, overlap"),
        (lambda: compare({"a": {"mode": "fibres"}}, LOOP), ConfigError, "threads"),
        (lambda: compare(BOTH, LOOP, clock="sundial"), ConfigError, "wall, virtual"),
        (lambda: compare(BOTH, LOOP, clock="virtual", **MOCK), ConfigError, "simulated"),
    ],
)
def test_wrong_calls_are_refused_before_anything_runs(
    call: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_a_workload_too_long_for_the_model_is_refused() -> None:
    long = closed_loop(concurrency=1, num_requests=1, prompt_tokens=100_000, output_tokens=1)
    with pytest.raises(BadRequest, match="context"):
        compare({"one": {}}, long, repeats=1, **MOCK)


def test_a_failing_request_is_named_with_its_run() -> None:
    many = closed_loop(concurrency=8, num_requests=8, prompt_tokens=9, output_tokens=9)
    tight = {"max_running_requests": 1, "max_queued_requests": 1}
    with pytest.raises(SgvizError, match=r"run 'tight'.*requests failed"):
        compare({"tight": tight}, many, repeats=1, **MOCK)


def test_a_run_whose_ends_are_not_recorded_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "SETTLE_S", 0.05)
    ring, number = RingSink(100), itertools.count(1)

    def tell(component: str, body: AnyBody) -> None:
        seq = next(number)
        ring.extend([Event(seq, seq, component, 0, body)])

    def settled(requests: int) -> Recording:
        live = Recording.live(ring.snapshot, dropped=lambda: ring.dropped, since=ring.since)
        return interleave._settled(live, requests, "mine")

    end = RequestFinished(
        rid="a", reason="stop", matched="", prompt_tokens=1, completion_tokens=1, cached_tokens=0
    )
    tell("scheduler", BatchProcessed(bid=1, finished=("a", "b")))
    tell("tokenizer_manager", end)
    assert settled(1).source == "mine"
    with pytest.raises(SgvizError, match=r"run 'mine': .* only 1 of 2 requests"):
        settled(2)
    for _ in range(100):
        tell("tokenizer_manager", end)
    assert settled(2).dropped == 2  # it can not be known, and the table shows the loss


def test_a_turn_after_a_failed_one_is_an_error_too() -> None:
    tight = {"max_running_requests": 1, "max_queued_requests": 1}
    many = multi_turn(sessions=6, turns=2, question_tokens=9, output_tokens=9)
    with pytest.raises(SgvizError, match=r"turn before it failed|queue"):
        compare({"tight": tight}, many, repeats=1, **MOCK)


@pytest.mark.slow
def test_processes_give_the_same_answers() -> None:
    modes = {"threads": {"mode": "threads"}, "processes": {"mode": "processes"}}
    shared = {name: value for name, value in MOCK.items() if name != "mode"}
    found = compare(modes, LOOP, repeats=1, event_loop="overlap", **shared)
    assert found.requests["same_output"].all() and (found.table.dropped_events == 0).all()
