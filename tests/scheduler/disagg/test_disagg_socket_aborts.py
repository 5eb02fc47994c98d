"""Over the real managers: an abort in each state, on each side, ends both sides at once and gives all back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import single
from socket_pair import SocketPair, sockets

from sgviz.events import schema

LONG = [(5 * i + i * i) % 97 for i in range(90)]
SHORT = LONG[:40]
MOST = 6
BACKENDS = pytest.mark.parametrize("backend", ["shm", "tcp"])
SIDES = pytest.mark.parametrize("side", ["prefill", "decode"])

# by state: which sides turn until it is reached, and how that shows
Reached = Callable[[SocketPair, str], bool]


def in_queue(side: str, name: str) -> Reached:
    return lambda pair, rid: rid in [req.rid for req in getattr(getattr(pair, side).state.disagg, name)]


def waits_on_prefill(pair: SocketPair, rid: str) -> bool:
    return rid in [req.rid for req in pair.prefill.state.waiting_queue]


def is_chunked(pair: SocketPair, rid: str) -> bool:
    return pair.prefill.state.chunked_req is pair.prefill.state.live.get(rid, 0)


def pieces(pair: SocketPair, rid: str) -> int:
    return sum(body.rid == rid for body in pair.decode.bodies(schema.KvReceived))


def decodes(pair: SocketPair, rid: str) -> bool:
    return len(pair.answers[rid].output_ids) >= 2


STATES: dict[str, tuple[str, Reached]] = {
    "prefill bootstrap": ("p", in_queue("prefill", "bootstrap")),
    "decode bootstrap": ("p", lambda pair, rid: rid in pair.prefill.state.live),  # decode takes both messages at once
    "decode met": ("d", in_queue("decode", "transfer")),
    "prefill waiting": ("pd", waits_on_prefill),
    "prefill chunked": ("pd", is_chunked),
    "transfer begun": ("pd", lambda pair, rid: pieces(pair, rid) >= 2),
    "prefill inflight": ("pd", in_queue("prefill", "inflight")),
    "decode ready": ("pd", in_queue("decode", "ready")),
    "decode running": ("pd", decodes),
}  # fmt: skip
UNTIL_COMPUTED = list(STATES)[:6]


@pytest.mark.parametrize(("backend", "overlap"), [("shm", True), ("tcp", False)])
@pytest.mark.parametrize("state", STATES)
@SIDES
def test_an_abort_ends_both_sides_and_gives_all_back(
    backend: str, side: str, state: str, overlap: bool
) -> None:
    with sockets(
        backend, overlap, prefill_page=16, decode_page=4, prefill_settings={"chunked_prefill_size": 32}
    ) as pair:
        first = pair.submit(LONG[::-1], MOST)  # so that the next has to wait
        rid, other = pair.submit(LONG, MOST), pair.submit(SHORT, MOST)
        turning, reached = STATES[state]
        pair.turn_until(lambda: reached(pair, rid), turning)
        getattr(pair, side).abort(rid)
        pair.settle()
        wanted = single([LONG[::-1], LONG, SHORT], MOST)
        assert [pair.answers[each].output_ids for each in (first, other)] == [wanted[0], wanted[2]]
        answer = pair.answers[rid]
        assert answer.output_ids == wanted[1][: len(answer.output_ids)]
        if state in UNTIL_COMPUTED:
            assert answer.reason == "abort" and answer.finish.message == "test" and not answer.output_ids
            assert answer.status == (500 if side == "prefill" else None)
            assert pair.prefill.answers[rid].reason == "abort"
            if side == "decode":
                assert pair.prefill.answers[rid].finish.message == "the decode side ended it: test"
        else:
            assert answer.reason == "abort" or answer.output_ids == wanted[1]
        pair.check_recordings()


@SIDES
@BACKENDS
def test_an_abort_before_the_other_side_has_the_request_waits_for_it(backend: str, side: str) -> None:
    """Neither side's pages wait for a time limit."""
    with sockets(backend) as pair:
        rid = pair.submit(LONG, to=side)
        there = "decode" if side == "prefill" else "prefill"
        rig, other = getattr(pair, side), getattr(pair, there)
        pair.turns(20)
        rig.abort(rid)
        pair.turn_until(lambda: rig.answers[rid].finals == 1)
        pair.turn_until(lambda: pair.idle)
        pair.submit(LONG, rid=rid, room=pair.room(rid), to=there)
        pair.settle()
        assert other.answers[rid].status == 500 and other.answers[rid].finish.message.endswith("test")
        rid = pair.submit(SHORT, MOST, room=pair.room(rid))  # the room is free again
        pair.settle()
        assert pair.answers[rid].output_ids == single([SHORT], MOST)[0]


@BACKENDS
def test_an_abort_while_the_decode_side_has_no_room(backend: str) -> None:
    with sockets(backend, tokens=512, decode_tokens=128) as pair:
        first = pair.submit(LONG, 30)
        pair.turn_until(lambda: decodes(pair, first))
        rids = [pair.submit(LONG, MOST) for _ in range(2)]
        pair.turn_until(lambda: all(in_queue("decode", "prealloc")(pair, rid) for rid in rids))
        pair.decode.abort(rids[0])
        pair.prefill.abort(rids[1])
        pair.turn_until(lambda: not any(rid in side.state.live for rid in rids for side in pair.sides))
        assert first in pair.decode.state.live
        pair.settle()
        assert pair.answers[first].output_ids == single([LONG], 30)[0]


@BACKENDS
def test_an_abort_of_all_on_the_decode_side_ends_the_prefill_side_too(backend: str) -> None:
    with sockets(backend, prefill_settings={"chunked_prefill_size": 32}) as pair:
        rids = [pair.submit(LONG[k:], MOST) for k in range(6)]
        pair.turn_until(lambda: decodes(pair, rids[0]))
        late = [pair.submit(LONG[k:], MOST) for k in range(6)]
        pair.decode.abort(abort_all=True)
        pair.settle()
        assert {pair.answers[rid].reason for rid in (*rids[1:], *late)} <= {"abort", "length"}
        assert all(pair.prefill.answers[rid].finals == 1 for rid in (*rids, *late))


@SIDES
def test_what_one_side_refuses_ends_on_the_other_with_its_status(side: str) -> None:
    """A prompt that is too long for one of the two: 400 with the reason, from both."""
    sizes = {"tokens": 512, "decode_tokens": 512, "tokens" if side == "prefill" else "decode_tokens": 64}
    with sockets("shm", **sizes) as pair:
        rid = pair.submit(LONG)
        pair.settle()
        for rig in pair.sides:
            answer = rig.answers[rid]
            assert answer.status == 400 and "90 tokens" in answer.finish.message and not answer.output_ids
