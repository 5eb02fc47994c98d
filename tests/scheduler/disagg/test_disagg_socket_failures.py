"""Over the real managers: who dies, is late, says a thing twice or is missing ends what it must in the stated time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import single
from socket_pair import SECOND, SideRig, SocketPair, sockets

from sgviz.disaggregation.limits import Limits
from sgviz.disaggregation.wire import Abort, Piece, PieceDone
from sgviz.events import schema

LONG = [(5 * i + i * i) % 97 for i in range(90)]
SHORT = LONG[:40]
MOST = 6
SILENCE_S = 12.5  # with the default settings: two signs of life, 5 s apart, and a half
BACKENDS = pytest.mark.parametrize("backend", ["shm", "tcp"])


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[SocketPair]:
    limits: dict[str, object] = {
        "disaggregation_bootstrap_timeout": 20.0,
        "disaggregation_waiting_timeout": 30.0,
    }
    with sockets(
        request.param,
        limits=limits,
        prefill_page=16,
        decode_page=4,
        prefill_settings={"chunked_prefill_size": 32},
    ) as made:
        assert Limits.of(made.net.settings.disaggregation).silence == SILENCE_S * SECOND
        yield made


def goes_on(pair: SocketPair) -> None:
    """The next request is answered, and nothing is held."""
    rid = pair.submit(SHORT, MOST)
    pair.settle()
    assert pair.answers[rid].output_ids == single([SHORT], MOST)[0]
    pair.check_recordings()


def ended(rig: SideRig, rid: str, status: int, text: str) -> None:
    answer = rig.answers[rid]
    assert answer.reason == "abort" and answer.status == status and text in answer.finish.message, answer
    assert not rig.is_decode or not answer.output_ids


def holds_nothing(rig: SideRig) -> bool:
    ledger = rig.state.cache.ledger()
    return not rig.state.live and not rig.state.disagg.draining and ledger.private == ledger.protected == 0


def pieces(pair: SocketPair, rid: str) -> int:
    return sum(body.rid == rid for body in pair.decode.bodies(schema.KvReceived))


# ------------------------------------------------------------ the prefill side dies


def test_prefill_dies_before_the_transfer(pair: SocketPair) -> None:
    goes_on(pair)
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: rid in [req.rid for req in pair.decode.state.disagg.transfer], "d")
    pair.pass_time(SILENCE_S - 2, "d")
    assert rid in pair.decode.state.live
    pair.pass_time(4, "d")
    ended(pair.decode, rid, 503, "silent for")
    assert holds_nothing(pair.decode)
    pair.restart("prefill")
    goes_on(pair)


def test_prefill_dies_during_the_transfer(pair: SocketPair) -> None:
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: pieces(pair, rid) >= 1)
    assert rid in [req.rid for req in pair.decode.state.disagg.transfer]
    pair.pass_time(SILENCE_S + 2, "d")
    ended(pair.decode, rid, 503, "silent for")
    assert holds_nothing(pair.decode)
    pair.restart("prefill")
    goes_on(pair)


def test_prefill_dies_after_the_transfer(pair: SocketPair) -> None:
    """What has its KV does not need it any more."""
    rid = pair.submit(LONG, 40)
    pair.turn_until(lambda: bool(pair.answers[rid].output_ids))
    waiting = pair.submit(SHORT, MOST, to="decode")
    pair.pass_time(SILENCE_S + 2, "d")
    assert pair.answers[rid].output_ids == single([LONG], 40)[0]
    ended(pair.decode, waiting, 503, "silent for")
    pair.restart("prefill")
    goes_on(pair)


def test_prefill_that_only_slept_serves_again(pair: SocketPair) -> None:
    """Its decode side has given it up; what it still sends belongs to nobody."""
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: pieces(pair, rid) >= 1)
    pair.pass_time(SILENCE_S + 2, "d")
    ended(pair.decode, rid, 503, "silent for")
    other = pair.submit(LONG[::-1], MOST, to="decode")  # takes the pages
    pair.pass_time(3, "d")
    pair.pass_time(SILENCE_S + 2, "pd")
    assert holds_nothing(pair.prefill) and pair.prefill.answers[rid].status == 503
    pair.decode.abort(other)
    goes_on(pair)


# ------------------------------------------------------------ the decode side dies


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_decode_dies(pair: SocketPair, when: str) -> None:
    rid = pair.submit(LONG, 40)
    if when == "before":
        pair.turn_until(lambda: rid in [req.rid for req in pair.decode.state.disagg.transfer])
        pair.turn_until(lambda: not pair.prefill.state.disagg.bootstrap, "p")
    elif when == "during":
        pair.turn_until(lambda: pieces(pair, rid) >= 1)
    else:
        pair.turn_until(lambda: bool(pair.answers[rid].output_ids) and holds_nothing(pair.prefill))
    pair.pass_time(SILENCE_S + 2, "p")
    assert holds_nothing(pair.prefill)
    if when != "after":
        ended(pair.prefill, rid, 503, "silent for")
    pair.restart("decode")
    goes_on(pair)


def test_decode_dies_before_the_prefill_side_heard_of_it(pair: SocketPair) -> None:
    rid = pair.submit(LONG, to="prefill")
    pair.pass_time(18, "p")
    assert rid in pair.prefill.state.live and pair.prefill.state.cache.private_size() == 0
    pair.pass_time(4, "p")
    ended(pair.prefill, rid, 500, "in 20 s")
    goes_on(pair)


def test_decode_that_only_slept_learns_that_it_is_given_up(pair: SocketPair) -> None:
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: pieces(pair, rid) >= 1)
    pair.pass_time(SILENCE_S + 2, "p")
    assert holds_nothing(pair.prefill)
    pair.turn_until(lambda: rid not in pair.decode.state.live)
    assert pair.answers[rid].reason == "length" or pair.answers[rid].status == 503
    goes_on(pair)


# ------------------------------------------------------------ what is late, doubled, lost


def test_what_is_said_twice_counts_once(pair: SocketPair) -> None:
    """Every message of either side, twice."""
    for manager in (pair.of_prefill, pair.of_decode):
        once = manager._send

        def twice(*given: object, once: object = once) -> None:
            once(*given)  # type: ignore[operator]
            once(*given)  # type: ignore[operator]

        manager._send = twice  # type: ignore[method-assign]
    prompts = [LONG, SHORT, LONG[::-1]]
    rids = [pair.submit(ids, MOST) for ids in prompts]
    pair.settle()
    assert [pair.answers[rid].output_ids for rid in rids] == single(prompts, MOST)
    pair.check_recordings()


def test_what_is_late_touches_nobodys_pages(pair: SocketPair) -> None:
    """Pieces of a request that has ended arrive when its pages are another's."""
    held: list[tuple[object, ...]] = []
    send = pair.of_prefill._send

    def hold(identity: bytes, message: object, *data: memoryview) -> None:
        if isinstance(message, Piece) and message.room == 1 and message.number >= 4:
            held.append((identity, message, *data))
        else:
            send(identity, message, *data)  # type: ignore[arg-type]

    pair.of_prefill._send = hold  # type: ignore[method-assign]
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: len(held) == 2)
    pair.decode.abort(rid)
    pair.turn_until(lambda: rid not in pair.decode.state.live)
    other = pair.submit(LONG[::-1], 200)
    pair.turn_until(lambda: bool(pair.answers[other].output_ids))
    free = pair.decode.state.cache.ledger().free
    for message in held:
        send(*message)  # type: ignore[arg-type]
    pair.turns(20)
    assert pair.decode.state.cache.ledger().free <= free
    pair.settle()  # the buffers of the late pieces are back, too
    wanted = single([LONG[::-1]], 200)[0]
    assert pair.answers[other].output_ids == wanted
    ended(pair.decode, rid, None, "test")  # type: ignore[arg-type]
    goes_on(pair)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_what_is_lost_ends_that_request_alone(pair: SocketPair, number: int) -> None:
    """One piece never comes: the next tells so; after the last one, the time limit."""
    send = pair.of_prefill._send

    def lose(identity: bytes, message: object, *data: memoryview) -> None:
        if not (isinstance(message, Piece) and (message.room, message.number) == (1, number)):
            send(identity, message, *data)  # type: ignore[arg-type]

    pair.of_prefill._send = lose  # type: ignore[method-assign]
    rid, other = pair.submit(LONG, MOST), pair.submit(SHORT, MOST)
    if number == 5:
        pair.turn_until(lambda: pieces(pair, rid) == 5)
        pair.pass_time(28)
        assert rid in pair.decode.state.live
        pair.pass_time(4)
    pair.turn_until(lambda: all(side.answers[each].finals for side in pair.sides for each in (rid, other)))
    ended(pair.decode, rid, 500, "in 30 s" if number == 5 else "one is lost")
    ended(pair.prefill, rid, 500, "the decode side ended it")
    assert pair.answers[other].output_ids == single([SHORT], MOST)[0]
    goes_on(pair)


def test_a_lost_confirmation_keeps_no_page_and_no_buffer(pair: SocketPair) -> None:
    """The decode side has everything and answers; the prefill side does not know, until its limit."""
    send = pair.of_decode._send

    def lose(link: object, message: object) -> None:
        if not isinstance(message, PieceDone) or message.number < 5:
            send(link, message)  # type: ignore[arg-type]

    pair.of_decode._send = lose  # type: ignore[assignment,method-assign]
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: pair.answers[rid].finals == 1)
    assert pair.answers[rid].output_ids == single([LONG], MOST)[0]
    pair.pass_time(28)
    assert rid in pair.prefill.state.live
    pair.pass_time(4)
    ended(pair.prefill, rid, 500, "has taken nothing for 30 s")
    goes_on(pair)


def test_a_lost_goodbye_keeps_no_buffer(pair: SocketPair) -> None:
    """A confirmation is lost, and the answer to the end that follows from it: that end is told again."""
    send = pair.of_decode._send
    lost: list[object] = []

    def lose(link: object, message: object) -> None:
        is_last = isinstance(message, PieceDone) and message.room == 1 and message.number >= 5
        if is_last or (isinstance(message, Abort) and not any(isinstance(each, Abort) for each in lost)):
            lost.append(message)
        else:
            send(link, message)  # type: ignore[arg-type]

    pair.of_decode._send = lose  # type: ignore[assignment,method-assign]
    rid = pair.submit(LONG, MOST)
    pair.turn_until(lambda: pair.answers[rid].finals == 1)
    pair.pass_time(34)
    ended(pair.prefill, rid, 500, "has taken nothing for 30 s")
    assert any(isinstance(each, Abort) for each in lost)
    pair.pass_time(12)
    assert not pair.of_prefill._peers.hold_buffers
    goes_on(pair)


# ------------------------------------------------------------ who is not there


def test_a_room_that_nobody_else_has(pair: SocketPair) -> None:
    on_prefill = pair.submit(LONG, to="prefill")
    on_decode = pair.submit(SHORT, to="decode")
    pair.turn_until(lambda: bool(pair.of_prefill._lobby._early))
    pair.pass_time(16)
    assert on_prefill in pair.prefill.state.live and on_decode in pair.decode.state.live
    pair.pass_time(9)
    ended(pair.prefill, on_prefill, 500, "no decode side has told where its KV goes in 20 s")
    ended(pair.decode, on_decode, 500, "no request with it came in 20 s")
    assert all(holds_nothing(side) for side in pair.sides)
    goes_on(pair)


def test_two_decode_requests_in_one_room(pair: SocketPair) -> None:
    """The second is refused, whichever side sees it; the first goes on."""
    first = pair.submit(LONG, MOST)
    seconds = {
        side: pair.submit(SHORT, MOST, room=pair.room(first), to=side) for side in ("prefill", "decode")
    }
    pair.turn_until(lambda: pair.answers[first].finals == 1)
    for side, rid in seconds.items():
        ended(getattr(pair, side), rid, 400, f"bootstrap_room {pair.room(first)}")
    assert pair.answers[first].output_ids == single([LONG], MOST)[0]
    goes_on(pair)


def test_the_bootstrap_server_cannot_be_reached(pair: SocketPair) -> None:
    pair.net.server.close()
    rid = pair.submit(LONG, MOST, to="decode")
    for second in range(19):
        pair.pass_time(1, "d")
        time.sleep(0.05)  # the clock is not real, but the tries are
        assert second >= 10 or rid in pair.decode.state.live
    ended(pair.decode, rid, 503, "does not answer")
    assert "tried 15 times" in pair.answers[rid].finish.message
    assert holds_nothing(pair.decode) and not pair.of_decode.busy
