"""Pair: two engines asked as one, on simulated devices; and Trade, which lays runs beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, NotFound
from sgviz.events.schema import QueueEntered
from sgviz.experiment import Pair, Trade, drive
from sgviz.recording import PairedRecording, Recording
from sgviz.workload import Workload, gamma

H100 = {
    "model": "tiny-llama", "device": "sim:h100-sxm", "sim_model": "qwen2.5-0.5b", "log_level": "error",
    "disable_radix_cache": True,
}  # fmt: skip
PARAMS = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
TOKEN_BYTES = 24 * 2 * 2 * 64 * 2  # layers, K and V, heads, their size, bf16


@pytest.fixture(scope="module")
def work() -> Workload:
    return gamma(rate=60, cv=2, num_requests=12, prompt_tokens=(40, 900), output_tokens=(3, 24), seed=5)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair(mode="threads", **H100) as pair:
        yield pair


@pytest.fixture(scope="module")
def answers(pair: Pair, work: Workload) -> dict[str, tuple[int, ...]]:
    done = pair.drive(work)
    assert not [each.error for each in done.values() if each.error]
    return {rid: each.output_ids for rid, each in done.items()}


@pytest.fixture(scope="module")
def both(pair: Pair, answers: dict[str, tuple[int, ...]]) -> PairedRecording:
    return pair.recording()


@pytest.fixture(scope="module")
def ranks(work: Workload) -> tuple[dict[str, tuple[int, ...]], Recording]:
    with Engine(dp_size=2, **H100) as engine:
        done = drive(engine, work, stream=True)
        return {rid: each.output_ids for rid, each in done.items()}, engine.recording().freeze()


def test_a_pair_answers_as_two_ranks_do(
    answers: dict[str, tuple[int, ...]], ranks: tuple[dict[str, tuple[int, ...]], Recording]
) -> None:
    assert answers == ranks[0]


def test_the_recording_has_every_request_on_both_sides(both: PairedRecording, work: Workload) -> None:
    assert sorted(both.rids) == [each.rid for each in work.requests]
    assert both.audit().balanced, both.audit()
    table = both.requests.set_index("rid")
    for request in work.requests:
        row = table.loc[request.rid]
        assert row.prompt_tokens == request.prompt_tokens and row.completion_tokens == request.output_tokens
        assert row.transfer_bytes == request.prompt_tokens * TOKEN_BYTES
        assert row.bytes_per_s == pytest.approx(row.transfer_bytes / row.transfer_ms * 1000)
        assert row.transfer_bytes / row.bytes_per_s > row.transfer_bytes / 450e9  # not before the link can


def test_each_request_is_explained_over_both_without_a_gap(both: PairedRecording) -> None:
    for rid in both.rids:
        explanation = both.explain(rid)
        assert all(before.end_ns == after.start_ns for before, after in pairwise(explanation.parts))
        assert explanation.unexplained_ns == 0, explanation.text()
        assert {"prefill", "decode"} <= {part.side for part in explanation.parts}


def test_one_answer_streamed_and_whole(pair: Pair) -> None:
    async def streamed() -> list[int]:
        async for part in pair.stream(None, PARAMS, input_ids=[20] * 30, rid="same-rid"):
            last = part
        return list(last["output_ids"])

    whole = pair.generate(None, PARAMS, input_ids=[20] * 30, rid="same-rid")
    assert whole["output_ids"] == asyncio.run(streamed()) and len(whole["output_ids"]) == 6


def test_who_leaves_early_ends_both_sides(pair: Pair) -> None:
    async def leave() -> None:
        async for _ in pair.stream(None, {**PARAMS, "max_new_tokens": 4000}, input_ids=[20] * 9):
            return

    asyncio.run(leave())
    assert pair.generate(None, PARAMS, input_ids=[21] * 9)["meta_info"]["finish_reason"]["type"] == "length"
    for engine in (pair.prefill, pair.decode):
        engine._call(_idle(engine))


async def _idle(engine: Engine) -> None:
    async with asyncio.timeout(20):
        while not await engine.pipeline.manager.flush_cache():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": ["a", "b"]},
        {"input_ids": [[20], [21]]},
        {"prompt": "a", "sampling_params": {"n": 2}},
        {"prompt": "a", "bootstrap_room": 7},
        {"prompt": "a", "bootstrap_host": "somewhere"},
    ],
)
def test_what_a_pair_does_not_take_is_refused_before_anything_is_sent(
    pair: Pair, asked: dict[str, object]
) -> None:
    with pytest.raises(BadRequest, match=r"one answer a call|given by the pair"):
        pair.generate(**asked)  # type: ignore[arg-type]


def test_what_both_engines_refuse_has_their_reason(pair: Pair) -> None:
    with pytest.raises(BadRequest, match="vocabulary"):
        pair.generate(None, PARAMS, input_ids=[10**6])


@pytest.mark.parametrize("own", [{"disaggregation_mode": "decode"}, {"disaggregation_bootstrap_host": "::1"}])
def test_what_the_pair_sets_is_not_to_be_given(own: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="set by the pair"):
        Pair(mode="threads", decode=own, **H100)


def test_nothing_is_left_when_the_second_engine_does_not_start() -> None:
    with pytest.raises(ConfigError):
        Pair(mode="threads", decode={"page_size": 0}, **H100)


def test_no_request_is_no_recording_of_a_pair() -> None:
    with Pair(mode="threads", **H100) as pair, pytest.raises(BadRequest):
        pair.recording()


# ---------------------------------------------------------------- Trade


@pytest.fixture(scope="module")
def trade(both: PairedRecording, ranks: tuple[object, Recording]) -> Trade:
    return Trade({"dp 2": ranks[1], "pd 1 + 1": both})


def test_a_trade_has_the_same_work_on_each_side(trade: Trade, work: Workload) -> None:
    table, devices = trade.table, trade.devices
    assert list(table.index) == ["dp 2", "pd 1 + 1"] and (table.completed == len(work.requests)).all()
    assert list(devices.index) == [
        ("dp 2", "rank 0"), ("dp 2", "rank 1"), ("pd 1 + 1", "prefill"), ("pd 1 + 1", "decode")
    ]  # fmt: skip
    sums = devices.groupby("run")[["prompt_tokens", "output_tokens"]].sum()
    assert (sums.prompt_tokens == work.input_tokens).all() and (
        sums.output_tokens == work.output_tokens
    ).all()
    assert devices.loc[("pd 1 + 1", "decode"), "prompt_tokens"] == 0
    assert devices.loc[("pd 1 + 1", "prefill"), "output_tokens"] == len(work.requests)  # the first of each
    assert devices.busy_share.between(0, 1).all() and (devices.kv_peak <= devices.kv_tokens).all()


def test_its_latencies_are_all_there(trade: Trade, work: Workload) -> None:
    for own in trade.latencies.values():
        assert len(own.ttft) == len(own.e2e) == len(work.requests)
        assert len(own.itl) == work.output_tokens - len(work.requests)
        assert (own.ttft > 0).all() and (own.e2e >= own.ttft).all() and (own.itl >= 0).all()


def test_its_verdict_is_its_table(trade: Trade) -> None:
    one, two = trade.table.loc["dp 2"], trade.table.loc["pd 1 + 1"]
    assert trade.ratio("p50_ttft_ms", "pd 1 + 1") == two.p50_ttft_ms / one.p50_ttft_ms
    said = f"first token, p50: pd 1 + 1 {two.p50_ttft_ms:,.1f} ms, dp 2 {one.p50_ttft_ms:,.1f} ms"
    assert said in trade.verdict() and "SIMULATED" in trade.source_line()
    with pytest.raises(NotFound, match="p50_ttft_ms"):
        trade.ratio("p50_ttf_ms", "pd 1 + 1")


def test_it_is_drawn(trade: Trade) -> None:
    figure = trade.figure()
    assert [ax.get_xlabel() for ax in figure.axes] == ["first token (ms)", "between two tokens (ms)"]
    with pytest.raises(BadRequest):
        Trade({})


# ---------------------------------------------------------------- beside the forwards


@pytest.mark.parametrize("overlap", [True, False])
def test_kv_travels_while_the_next_prompt_is_computed(overlap: bool) -> None:
    """The long prompt takes a slow device most of a second; the short one's KV must not wait for its end."""
    slow = {**H100, "device": "sim:l4", "sim_model": "llama-3-8b", "disable_overlap_schedule": not overlap}
    with Pair(
        mode="threads", prefill={"prefill_max_requests": 1, "chunked_prefill_size": -1}, **slow
    ) as pair:

        async def ask() -> None:
            short = asyncio.create_task(pair.async_generate(None, PARAMS, input_ids=[20] * 1000, rid="short"))
            while not any(
                isinstance(event.body, QueueEntered) for event in pair.prefill.recording().stamped()
            ):
                await asyncio.sleep(0.005)
            await pair.async_generate(None, PARAMS, input_ids=[21] * 4000, rid="long")
            await short

        asyncio.run(ask())
        both = pair.recording()
    short, long = both.seen("short"), both.seen("long")
    assert short.computed < long.computed
    assert short.placed < long.computed, both.explain("short").text()
