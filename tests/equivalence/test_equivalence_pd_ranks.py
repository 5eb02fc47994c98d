"""Two ranks on each side of a pair: the ids of a single engine, and each decode rank asks the right prefill rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from greedy_reference import Reference
from pair_engines import EnginePair, Output, engine_pair

import sgviz
from sgviz.disaggregation import bootstrap_client
from sgviz.engine import Engine
from sgviz.errors import BadRequest, SgvizError
from sgviz.events.schema import DisaggBootstrapped, DpChose
from sgviz.model.fetch import resolve_model
from sgviz.recording import PairedRecording
from sgviz.recording.balance import summed_kv
from sgviz.viz.pair_figure import pair_figure

MODEL = "tiny-llama"
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
HEAD = [(7 * i) % 250 + 3 for i in range(48)]
ASKED = [HEAD[: 6 * i] + [(31 * i + 5 * k) % 250 + 3 for k in range(3 + 9 * i)] for i in range(9)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with Engine(MODEL, torch_threads=1, max_total_tokens=8192, disable_radix_cache=True) as engine:
        return [engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"] for ids in ASKED]


def ranks_of(outputs: Sequence[Output]) -> list[int]:
    return [output["meta_info"]["dp_rank"] for output in outputs]


def told_ranks(pair: EnginePair) -> tuple[dict[str, int], dict[str, int]]:
    """By rid the rank that the prefill controller chose, and the one that the decode side found."""
    chosen = [e.body for e in pair.prefill.pipeline.ring.snapshot() if isinstance(e.body, DpChose)]
    found = [e.body for e in pair.decode.pipeline.ring.snapshot() if isinstance(e.body, DisaggBootstrapped)]
    return {body.rid: body.rank for body in chosen}, {body.rid: body.prefill_dp_rank for body in found}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2+2": ({}, {}),
    "2+2, page 16+1": ({"page_size": 16}, {"load_balance_method": "total_tokens"}),
    "2+2, page 1+16, overlap": (
        {"event_loop": "overlap"}, {"page_size": 16, "event_loop": "overlap", "load_balance_method": "total_requests"},
    ),
    "2+2, prefill by load": ({"load_balance_method": "total_tokens"}, {"load_balance_method": "follow_bootstrap_room"}),
    "2+2, prefill in turn": ({"load_balance_method": "round_robin"}, {}),
    "2+1": ({}, {"dp_size": 1}),
    "1+2": ({"dp_size": 1}, {}),
    "4+2": ({"dp_size": 4}, {"disaggregation_decode_enable_radix_cache": True}),
}  # fmt: skip


QUICK = ("2+2", "2+2, prefill in turn")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_ids_are_those_of_one(
    case: str, plain: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [{"dp_size": 2, **side} for side in CASES[case]]
    sides[0].setdefault("chunked_prefill_size", 32)
    reference = Reference(resolve_model(MODEL))
    with engine_pair(MODEL, prefill=sides[0], decode=sides[1], disaggregation_checksum=True) as pair:
        found = [pair.generate(ASKED, GREEDY) for _ in range(2)]
        given, rooms = pair.given, pair.rooms
        paired = pair.check_books()
        pair.check_idle()
        chosen, asked = told_ranks(pair)
    with reference.telling(f"{MODEL} {case}", capsys):
        for outputs in found:
            reference.check_same(ASKED, plain, [out["output_ids"] for out in outputs])
    for side, outputs in zip(sides, (given, found[1])):
        assert set(ranks_of(outputs)) == set(range(side["dp_size"]))  # every rank worked
    if "load_balance_method" not in sides[0]:
        assert ranks_of(given) == [room % sides[0]["dp_size"] for room in rooms]
    assert chosen == (asked if sides[0]["dp_size"] > 1 else {})
    check_paired(paired, given, found[1])


def check_paired(paired: PairedRecording, given: list[Output], outputs: list[Output]) -> None:
    """The pair's table and explanations know the ranks, and explain without a gap."""
    table = paired.requests.set_index("rid")
    for first, second in zip(given, outputs):
        rid = second["meta_info"]["id"]
        row = table.loc[rid]
        assert (row.prefill_rank, row.decode_rank) == (
            first["meta_info"]["dp_rank"],
            second["meta_info"]["dp_rank"],
        )
        explanation = paired.explain(rid)
        assert explanation.unexplained_ns == 0, explanation.text()
        assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
        if len(paired.prefill.ranks) + len(paired.decode.ranks) > 2:
            ways = f"from prefill rank {row.prefill_rank} to decode rank {row.decode_rank}"
            assert any(ways in part.detail for part in explanation.parts)


@pytest.fixture(scope="module")
def pair() -> Iterator[EnginePair]:
    with engine_pair(MODEL, dp_size=2, disaggregation_bootstrap_timeout=2.0) as made:
        yield made
        made.check_idle()


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"disagg_prefill_dp_rank": 0}, (0, None)),
        ({"disagg_prefill_dp_rank": 1}, (1, None)),
        ({"disagg_prefill_dp_rank": 1, "routed_dp_rank": 0}, (1, 0)),
        ({"disagg_prefill_dp_rank": 0, "routed_dp_rank": 1}, (0, 1)),
    ],
)
def test_a_request_names_the_rank_of_either_side(
    pair: EnginePair, plain: list[list[int]], options: dict[str, int], ranks: tuple[int, int | None]
) -> None:
    for _ in range(2):  # an even room and an odd one
        output = pair.one(ASKED[4], GREEDY, **options)
        assert output["output_ids"] == plain[4]
        assert ranks_of(pair.given) == [ranks[0]]
        assert ranks[1] in (None, output["meta_info"]["dp_rank"])


@pytest.mark.parametrize("rank", [2, -1, True, "0"])
def test_a_prefill_rank_that_is_not_there_is_refused_at_once(pair: EnginePair, rank: object) -> None:
    call = {"input_ids": ASKED[1], "sampling_params": GREEDY, **pair.meeting(None)}
    with pytest.raises(BadRequest) as error:
        pair.prefill.generate(**call, disagg_prefill_dp_rank=rank)
    assert error.value.param == "disagg_prefill_dp_rank"
    with pytest.raises(SgvizError) as told:
        pair.decode.generate(**call, disagg_prefill_dp_rank=rank)
    if rank == 2:
        assert "prefill rank 2 is not one of the 2" in told.value.message
    else:
        assert isinstance(told.value, BadRequest)


def test_a_room_that_came_to_another_rank_ends_by_name(pair: EnginePair) -> None:
    """The decode side goes by the room where nobody names the prefill rank."""
    meeting = pair.meeting(None)
    wrong = 1 - pair.rooms[0] % 2
    call = {"input_ids": ASKED[1], "sampling_params": GREEDY, "rid": "lost", **meeting}
    with pytest.raises(SgvizError, match=f"came to prefill rank {1 - wrong} in 2 s"):
        pair.both(**call, routed_dp_rank=wrong)


def test_all_ranks_are_registered(pair: EnginePair) -> None:
    at = ("127.0.0.1", pair.port)
    shared = bootstrap_client.get_server(*at)
    assert (shared.dp_size, shared.follow_bootstrap_room) == (2, True)
    routes = [bootstrap_client.get_rank(*at, rank) for rank in range(2)]
    assert [route.dp_rank for route in routes] == [0, 1]
    assert len({port for route in routes for port in (route.rank_port, route.heart_port)}) == 4


def test_files_of_ranks_are_a_pair(tmp_path: Path, plain: list[list[int]]) -> None:
    with engine_pair(
        MODEL,
        dp_size=2,
        prefill={"record": str(tmp_path / "p.sgv")},
        decode={"record": str(tmp_path / "d.sgv")},
    ) as pair:
        outputs = pair.generate(ASKED, GREEDY)
        given = pair.given
        live = pair.check_books().requests
    paired = sgviz.load_pair(tmp_path / "p.sgv", tmp_path / "d.sgv")
    assert paired.audit().balanced and len(paired.requests) == len(live) == len(ASKED)
    check_paired(paired, given, outputs)
    for rec in (paired.prefill, paired.decode):
        assert rec.check() == [] and rec.audit().balanced
        memory, last = summed_kv(rec), [rec.rank(rank).kv.iloc[-1] for rank in rec.ranks]
        assert (memory.total == 2 * 8192).all()
        assert (memory.total == memory.free + memory.evictable + memory.protected + memory.private).all()
        assert memory.free.iloc[-1] == sum(row.free for row in last)
    assert pair_figure(paired).axes
