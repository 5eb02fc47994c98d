"""Requests of a pair that end before their time: aborts in every state, refusals, broken transfers, doubled rooms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import Pair, single
from rig import Rig

from sgviz.errors import ConfigError
from sgviz.events import schema
from sgviz.messages import GetInternalStateReq
from sgviz.worker.mock_worker import MockWorker
from sgviz.worker.steps import SlowWorker

LONG = [(5 * i + i * i) % 97 for i in range(90)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("after", range(14))
def test_an_abort_at_any_turn_leaves_nothing_on_either_side(after: int, side: str, overlap: bool) -> None:
    pair = Pair(
        delay=2, overlap=overlap, prefill_page=16, decode_page=4,
        prefill_settings={"chunked_prefill_size": 32},
    )  # fmt: skip
    rid, other = pair.submit(LONG, 6), pair.submit(LONG[:40], 6)
    pair.turns(after)
    getattr(pair, side).abort(rid)
    pair.run()
    pair.check_empty()
    assert pair.answers[other].output_ids == single([LONG[:40]], 6)[0]
    assert pair.answers[rid].reason in ("abort", "length")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", range(10))
def test_a_broken_transfer_ends_both_with_its_error(after: int, overlap: bool) -> None:
    pair = Pair(delay=3, overlap=overlap, prefill_settings={"chunked_prefill_size": 32})
    rid = pair.submit(LONG, 3)
    pair.turns(1)
    pair.turns(after)
    was_over = pair.wire.rooms[pair.room(rid)].aux is not None
    if not was_over:
        pair.wire.fail(pair.room(rid), "the cable is cut")
    pair.run()
    pair.check_empty()
    if not was_over:
        for each in pair.sides:
            answer = each.answers[rid]
            assert (
                answer.reason == "abort"
                and answer.status == 500
                and answer.finish.message == "the cable is cut"
            )
            assert each is not pair.decode or not answer.output_ids
            ends = [body for body in each.bodies(schema.DisaggTransferred) if body.rid == rid]
            assert [(body.ok, body.why) for body in ends] == [(False, "the cable is cut")]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_alone_on_one_side_waits_and_can_be_aborted(side: str) -> None:
    pair = Pair()
    rid = pair.submit(range(20), to=side)
    pair.turns(5)
    rig = getattr(pair, side)
    assert [req.rid for req in rig.state.disagg.bootstrap] == [rid]
    assert rig.state.num_queued == 1 and rig.state.num_running == 0 and not rig.state.is_fully_idle
    rig.abort(rid)
    pair.run()
    assert rig.answers[rid].cut
    rig.check_empty()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("room", "host", "name"), [(None, "h", "bootstrap_room"), (3, None, "bootstrap_host")]
)
def test_a_request_that_names_no_meeting_place_is_refused(
    side: str, room: int | None, host: str | None, name: str
) -> None:
    pair = Pair()
    rid = pair.submit([1, 2], to=side, room=room, host=host)
    pair.turn()
    answer = getattr(pair, side).answers[rid]
    assert answer.status == 400 and name in answer.finish.message
    pair.run()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_doubled_room_ends_the_second_request_alone(side: str) -> None:
    pair = Pair()
    first = pair.submit(range(20))
    second = pair.submit(range(30), room=pair.room(first), to=side)
    pair.run()
    rig = getattr(pair, side)
    assert rig.answers[second].status == 400 and "room" in rig.answers[second].finish.message
    assert pair.answers[first].output_ids == single([list(range(20))], 8)[0]


def test_what_the_prefill_side_refuses_ends_on_the_decode_side_with_the_same_error() -> None:
    pair = Pair(tokens=64, decode_tokens=512)
    rid = pair.submit(range(70))
    pair.turns(3)
    why = pair.prefill.answers[rid].finish.message
    assert pair.answers[rid].status == pair.prefill.answers[rid].status == 400
    assert pair.answers[rid].finish.message == why and "70 tokens" in why
    pair.run()
    pair.check_empty()


def test_the_data_of_another_room_are_not_taken() -> None:
    pair = Pair()
    pair.wire.wrong_room = 77
    rid = pair.submit(range(20))
    pair.run()
    assert pair.answers[rid].status == 500 and "room 77" in pair.answers[rid].finish.message
    pair.decode.check_empty()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pages_that_a_transfer_uses_are_nobodys_until_it_stops(side: str) -> None:
    pair = Pair(delay=8, prefill_settings={"chunked_prefill_size": 32, "disable_radix_cache": True})
    rid = pair.submit(LONG)
    rig = getattr(pair, side)
    for _ in range(20):
        pair.turn()
        if pair.wire.rooms[pair.room(rid)].pieces and rig.state.live:
            break
    rig.abort(rid)
    pair.turn()
    rig.until_true(lambda: rid not in rig.state.live, most=6)
    assert rig.state.disagg.draining and rig.state.cache.private_size() and not rig.state.is_fully_idle
    rig.submit([1], rid=rid)  # its name is not free either
    pair.turn()
    pair.run()
    ledger = rig.state.cache.ledger()
    assert ledger.private == ledger.protected == 0


def test_states_and_loads_count_the_queues() -> None:
    pair = Pair(decode_tokens=64, delay=4)
    for _ in range(3):
        pair.submit(range(40), 10)
    pair.turns(4)
    pair.decode.inbox.send(GetInternalStateReq(id="s"))
    pair.turn()
    account = pair.decode.replies[-1].state
    assert account["decode_prealloc_queue_reqs"] == 2 and account["decode_transfer_queue_reqs"] == 1
    assert account["num_running_reqs"] == 0
    refused = pair.decode.bodies(schema.DisaggPreallocRefused)
    assert [(body.reason, body.behind) for body in refused] == [("kv", 1)]
    assert not pair.decode.flush().success
    pair.run()
    pair.check_empty()
    assert pair.decode.flush().success and pair.prefill.flush().success


def test_a_mode_and_its_manager_belong_together() -> None:
    with pytest.raises(ConfigError, match="prefill and decode need one"):
        Rig(disaggregation_mode="prefill")
    with pytest.raises(ConfigError, match="null has none"):
        Rig(kv_manager=Pair().wire)
    with pytest.raises(ConfigError, match="a SlowWorker cannot travel"):
        slow = SlowWorker(MockWorker(), 0.1)
        Rig(kv_manager=Pair().wire, disaggregation_mode="decode", worker=slow)
