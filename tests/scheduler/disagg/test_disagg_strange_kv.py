"""KV that is not what a request needs, although it came in order, is nobody's answer and nobody's prefix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import single
from rig import Answer
from socket_pair import sockets

from sgviz.disaggregation import FAKE_BOOTSTRAP_HOST
from sgviz.disaggregation.wire import Piece

PROMPT = [(5 * i + i * i) % 97 for i in range(40)]


@pytest.mark.parametrize("page", [1, 4])
def test_what_never_came_is_nobodys_prefix(page: int) -> None:
    """A request without another side has pages that nobody wrote; the prefix cache must not give them to others."""
    radix = {"disaggregation_decode_enable_radix_cache": True}
    with sockets("shm", decode_page=page, decode_settings=radix) as pair:
        pair.decode.worker._check = False  # there is no KV that could be right
        for most in (1, 20):
            pair.submit(PROMPT, most, to="decode", host=FAKE_BOOTSTRAP_HOST)
            pair.decode.run()
        assert pair.decode.state.cache.evictable_size() == 0
        pair.decode.worker._check = True
        rid = pair.submit(PROMPT, 6)
        pair.settle()
        assert pair.answers[rid].output_ids == single([PROMPT], 6)[0]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("early", ["prefill", "decode"])
def test_two_prompts_of_one_length_in_one_room(backend: str, early: str) -> None:
    """Each side has another request of that room: the error says so, and no token of the wrong prompt is told."""
    with sockets(backend) as pair:
        late = "decode" if early == "prefill" else "prefill"
        first = pair.submit(PROMPT, 6, room=7, to=early)
        pair.turns(20)
        second = pair.submit(PROMPT[::-1], 6, room=7, to=late)
        rid = first if early == "decode" else second
        pair.turn_until(lambda: bool(pair.decode.answers[rid].finals))
        answer = pair.decode.answers[rid]
        assert answer.status == 400 and "another prompt" in answer.finish.message and not answer.output_ids
        assert "bootstrap_room 7" in answer.finish.message
        pair.settle()
        again = pair.submit(PROMPT, 6)
        pair.settle()
        assert pair.answers[again].output_ids == single([PROMPT], 6)[0]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("early", ["prefill", "decode"])
def test_a_prompt_shorter_than_what_the_decode_side_has_of_another(backend: str, early: str) -> None:
    radix = {"disaggregation_decode_enable_radix_cache": True}
    with sockets(backend, decode_settings=radix) as pair:
        pair.submit(PROMPT, 6)
        pair.settle()
        asked = {"decode": [*PROMPT, 5, 6, 7], "prefill": PROMPT[:12]}
        late = "decode" if early == "prefill" else "prefill"
        rids = {to: pair.submit(asked[to], 6, room=9, to=to) for to in (early, late)}
        pair.turn_until(lambda: all(getattr(pair, to).answers[rid].finals for to, rid in rids.items()))
        for to, rid in rids.items():
            answer = getattr(pair, to).answers[rid]
            assert (
                answer.status == 400 and "bootstrap_room 9" in answer.finish.message and not answer.output_ids
            )
            assert "the decode side has 40 tokens of its prompt, this one has 12" in answer.finish.message
        again = pair.submit(PROMPT, 6)
        pair.settle()
        assert pair.answers[again].output_ids == single([PROMPT], 6)[0]
        pair.check_recordings()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_late_pieces_for_a_room_that_another_request_has_now(backend: str) -> None:
    """They come in order, of the same length and number as those that are awaited, and yet they are not them."""
    with sockets(backend, prefill_settings={"chunked_prefill_size": 16}) as pair:
        held: list[tuple[object, ...]] = []
        send = pair.of_prefill._send

        def hold(identity: bytes, message: object, *data: memoryview | None) -> None:
            if isinstance(message, Piece):
                held.append((identity, message, *(each and bytes(each) for each in data)))
            else:
                send(identity, message, *data)

        pair.of_prefill._send = hold  # type: ignore[method-assign]
        first = pair.submit(PROMPT, 6, room=7)
        pair.turn_until(lambda: len(held) == 3)
        pair.decode.abort(first)
        pair.turn_until(lambda: all(side.answers[first].finals for side in pair.sides))
        second = pair.submit(PROMPT[::-1], 6, rid=first + "again", room=7)
        pair.turn_until(lambda: bool(pair.decode.state.disagg.transfer), "d")
        for late in held:
            send(late[0], late[1], *(each and memoryview(each) for each in late[2:]))  # type: ignore[arg-type]
        pair.of_prefill._send = send  # type: ignore[method-assign]
        pair.settle()
        assert pair.answers[second].output_ids == single([PROMPT[::-1]], 6)[0]


def test_a_name_and_a_room_that_are_used_again_are_no_fault_of_the_books() -> None:
    """A name that ended twice before its server was idle, and its room under another name."""
    with sockets("shm") as pair:
        busy = pair.submit(PROMPT, 200)
        pair.turn_until(lambda: bool(pair.answers[busy].output_ids))
        for _ in range(2):
            for side in pair.sides:
                side.answers["one"] = Answer()
            pair.submit(PROMPT, 6, rid="one", room=700)
            pair.turn()
            pair.decode.abort("one")
            pair.turn_until(lambda: all(side.answers["one"].finals for side in pair.sides))
        pair.submit(PROMPT, 6, rid="two", room=700)
        pair.settle()
        assert pair.answers["two"].output_ids == single([PROMPT], 6)[0]
        pair.check_recordings()
