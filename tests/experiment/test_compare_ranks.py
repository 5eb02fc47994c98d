"""compare over load_balance_method: what each rank got, how uneven that is, and the picture of it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sgviz.errors import ConfigError
from sgviz.experiment import Comparison, compare
from sgviz.experiment.comparison import RANKED
from sgviz.recording.balance import imbalance, rank_loads
from sgviz.workload import Request, Segment, Workload, closed_loop, heavy_tail

RANKS, REQUESTS, SHORT, LONG = 4, 40, 10, 200
METHODS = ("round_robin", "total_requests", "total_tokens")
MOCK = {"model": "tiny-llama", "device": "mock", "mode": "threads", "mock_step_ms": 20.0}
# every fourth prompt is long, so that whoever goes in turn gives them all to one rank
SKEWED = Workload(
    name="skewed",
    seed=1,
    requests=tuple(
        Request(
            rid=f"r{n:02d}",
            at_s=0.0,
            output_tokens=8,
            prompt=(Segment(f"p{n}", SHORT if n % RANKS else LONG),),
        )
        for n in range(REQUESTS)
    ),
)


@pytest.fixture(scope="module")
def compared() -> Comparison:
    runs = {method: {"load_balance_method": method} for method in METHODS}
    return compare(runs, SKEWED, repeats=1, dp_size=RANKS, **MOCK)


def test_in_turn_all_long_prompts_go_to_one_rank_and_by_tokens_they_do_not(compared: Comparison) -> None:
    loads = compared.rank_loads
    turn = loads.loc["round_robin"]
    assert list(turn.requests) == [REQUESTS / RANKS] * RANKS
    assert list(turn.prompt_tokens) == [10 * LONG, *([10 * SHORT] * (RANKS - 1))]
    table = compared.table[RANKED]
    assert table["round_robin"] == pytest.approx(2000 / 575)
    assert table["total_tokens"] < 0.7 * table["round_robin"]


def test_the_numbers_are_those_of_the_recordings(compared: Comparison) -> None:
    assert compared.ranked
    for name in METHODS:
        run = compared.middle(name)
        assert compared.table.loc[name, RANKED] == imbalance(run.recording)
        pd.testing.assert_frame_equal(
            compared.rank_loads.loc[name], rank_loads(run.recording).set_index("dp_rank"), check_dtype=False
        )
        mine = compared.rank_loads.loc[name]
        assert mine.prompt_tokens.sum() == SKEWED.input_tokens and mine.requests.sum() == REQUESTS
        assert mine.output_tokens.sum() == SKEWED.output_tokens
        assert run.recording.check() == [] and run.recording.audit().balanced
    assert compared.requests["same_output"].all()


def test_the_account_is_that_of_one_loop(compared: Comparison) -> None:
    for run in compared.runs:
        account = run.account
        assert 0 < account.launches <= len(run.recording.batches)
        assert account.device_idle_s == pytest.approx(account.host_exposed_s + account.handoff_s)


def test_it_is_printed_drawn_and_saved(compared: Comparison, tmp_path: Path) -> None:
    assert (
        "imbalance (prompt tokens of the busiest rank" in str(compared)
        and "imbalance" in compared._repr_html_()
    )
    titles = [ax.get_title() for part in compared.figure().subfigs for ax in part.axes]
    assert f"round_robin: {2000 / 575:.2f} x mean" in titles
    assert [title.split(":")[0] for title in titles if "x mean" in title] == list(METHODS)
    heights = [bar.get_height() for bar in compared.figure().subfigs[-1].axes[0].patches]
    assert heights == list(compared.rank_loads.loc["round_robin"].prompt_tokens)
    compared.save(tmp_path)
    saved = pd.read_csv(tmp_path / "rank_loads.csv")
    assert len(saved) == len(METHODS) * RANKS and saved.requests.sum() == len(METHODS) * REQUESTS


def test_with_one_scheduler_nothing_is_said_of_ranks() -> None:
    work = closed_loop(concurrency=2, num_requests=4, prompt_tokens=5, output_tokens=3)
    alone = compare({"one": {}}, work, repeats=1, **{**MOCK, "mock_step_ms": 1.0})
    assert not alone.ranked and "imbalance" not in str(alone)
    assert alone.table.loc["one", RANKED] == 1.0 and len(alone.figure().subfigs) == 3


def test_on_simulated_devices_on_the_wall_clock_only() -> None:
    sim = {"model": "tiny-llama", "device": "sim:h100-sxm", "sim_model": "qwen2.5-0.5b", "dp_size": 2}
    work = heavy_tail(num_requests=40, output_tokens=2, seed=3)
    runs = {name: {"load_balance_method": name} for name in ("round_robin", "total_tokens")}
    found = compare(runs, work, repeats=1, mode="threads", **sim)
    assert found.simulated and found.ranked and "SIMULATED" in str(found)
    assert found.rank_loads.groupby("run").prompt_tokens.sum().to_dict() == dict.fromkeys(
        runs, work.input_tokens
    )
    assert found.table[RANKED].min() >= 1.0 and found.table[RANKED].max() <= 2.0
    with pytest.raises(ConfigError, match="virtual time has one scheduler") as error:
        compare(runs, work, repeats=1, clock="virtual", **sim)
    assert error.value.param == "dp_size"
