"""Who gets a request under each policy, and which rooms."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.errors import Unavailable
from sgviz.router.bodies import Asked
from sgviz.router.choose import Chooser
from sgviz.router.options import POLICIES
from sgviz.router.rooms import BITS, Rooms
from sgviz.router.servers import Server
from sgviz.serving.routing import RANKS_OUT, ranks_out, tell_ranks_out


def servers(*loads: int) -> list[Server]:
    return [
        Server(f"http://d:{number}", "decode", why="", requests=load) for number, load in enumerate(loads, 1)
    ]


def chooser(policy: str, some: list[Server]) -> Chooser:
    return Chooser(policy, some, random.Random(1))


def test_round_robin_takes_turns_and_skips_the_lost() -> None:
    some = servers(9, 0, 0, 0)
    choose = chooser("round_robin", some).choose
    assert [choose() for _ in range(8)] == some * 2
    some[1].lose("gone")
    assert Counter(choose().url for _ in range(9)) == {each.url: 3 for each in some if each is not some[1]}
    some[1].find()
    assert {choose().url for _ in range(4)} == {each.url for each in some}


def test_least_requests_takes_the_emptiest_and_equals_in_turn() -> None:
    some = servers(2, 1, 1, 3)
    choose = chooser("least_requests", some).choose
    assert [choose() for _ in range(4)] == [some[1], some[2]] * 2
    some[1].requests = 5
    assert choose() is some[2]


def test_power_of_two_never_takes_the_fullest_and_knows_all() -> None:
    some = servers(0, 1, 2, 9)
    choose = chooser("power_of_two", some).choose
    taken = Counter(some.index(choose()) for _ in range(600))
    assert taken[3] == 0 and taken[0] > taken[1] > taken[2] > 0
    assert chooser("power_of_two", some[:1]).choose() is some[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_failed_comes_last_and_the_lost_not_at_all(policy: str) -> None:
    some = servers(0, 0, 0)
    here = chooser(policy, some)
    first = some[0].url
    assert all(here.choose({first}).url != first for _ in range(20))
    some[1].lose("one reason")
    some[2].lose("another")
    assert here.choose({first}).url == first
    some[0].lose("third")
    with pytest.raises(Unavailable, match=r"one reason.*another"):
        here.choose()


def test_a_question_takes_nobodys_turn() -> None:
    some = servers(0, 0)
    here = chooser("round_robin", some)
    got = []
    for _ in range(4):
        got.append(here.choose())
        here.any_one()
    assert got == some * 2


@given(st.integers(1, 50), st.integers(1, 50))
def test_rooms_under_way_are_distinct_and_never_that_of_probes(first: int, second: int) -> None:
    rooms = Rooms(random.Random(3))
    one, two = rooms.take(first), rooms.take(second)
    assert len({*one, *two}) == len(rooms) == first + second
    assert all(0 < room < 2**63 for room in (*one, *two))
    rooms.free(one)
    assert len(rooms) == second


@given(st.integers(1, 6), st.data())
def test_rooms_are_of_ranks_that_are_in_use(ranks: int, data: st.DataObject) -> None:
    out = data.draw(st.sets(st.integers(0, ranks - 1)))
    of = {room % ranks for room in Rooms(random.Random(4)).take(200, ranks, out)}
    assert of == (set(range(ranks)) - out or set(range(ranks)))  # where none is, the server says so


@pytest.mark.parametrize("text", ["", "1", "x of 2", "1 of", "1,2 of 3 of 4", "1,,2 of 4"])
def test_what_a_server_tells_of_its_ranks_may_be_anything(text: str) -> None:
    assert ranks_out({RANKS_OUT: text}) == ranks_out({}) == (1, frozenset())
    assert ranks_out(tell_ranks_out([1, 3], 4)) == (4, {1, 3}) and tell_ranks_out([], 4) == {}


def test_a_room_that_is_taken_or_zero_is_drawn_again() -> None:
    class Scripted(random.Random):
        def getrandbits(self, bits: int) -> int:
            assert bits == BITS
            return next(draws)

    draws = iter([7, 0, 7, 8, 7])
    rooms = Rooms(Scripted())
    assert rooms.take(2) == [7, 8]
    rooms.free([7])
    assert rooms.take(1) == [7]


def bodies(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the prefill and the decode server get."""
    prefill = Server("http://p:1", "prefill", bootstrap_host="p", bootstrap_port=5)
    meeting = Asked("/generate", body).for_pair(prefill, Rooms(random.Random(1)))
    return json.loads(meeting.prefill), json.loads(meeting.decode)


def test_a_rank_is_the_decode_servers_and_the_prefill_rank_goes_to_the_other() -> None:
    prefill, decode = bodies({"text": "a", "routed_dp_rank": 3, "disagg_prefill_dp_rank": 1})
    assert (prefill["routed_dp_rank"], decode["routed_dp_rank"]) == (1, 3)
    assert prefill["disagg_prefill_dp_rank"] == decode["disagg_prefill_dp_rank"] == 1
    prefill, decode = bodies({"text": "a", "data_parallel_rank": 3})
    assert prefill["routed_dp_rank"] is None and "data_parallel_rank" not in prefill
    assert decode["data_parallel_rank"] == 3
    prefill, decode = bodies({"text": "a"})
    assert prefill == decode
