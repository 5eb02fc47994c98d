"""Who gets a request: each policy against the plainest way to say what it does."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from dp_rig import request
from hypothesis import given
from hypothesis import strategies as st

from sgviz.config import Settings
from sgviz.data_parallel.budget import DPBudget
from sgviz.data_parallel.load_snapshots import SnapshotList
from sgviz.data_parallel.policies import (
    FollowBootstrapRoom,
    RankLoad,
    RoundRobin,
    TotalRequests,
    TotalTokens,
    make_dispatch_policy,
)
from sgviz.errors import BadRequest, ConfigError, Unavailable

LOADS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6
).filter(lambda ranks: any(active for active, _, _ in ranks))


def ranks_of(loads: list[tuple[bool, int, int]]) -> list[RankLoad]:
    return [RankLoad(rank, *load) for rank, load in enumerate(loads)]


@given(st.lists(LOADS.map(lambda loads: [active for active, _, _ in loads]), max_size=30), st.integers(1, 6))
def test_round_robin_goes_on_from_the_last_to_the_next_active(turns: list[list[bool]], size: int) -> None:
    policy, last = RoundRobin(), -1
    for turn in turns:
        active = (turn * size)[:size]
        if not any(active):
            continue
        chosen = policy.choose(request("r"), [RankLoad(rank, on) for rank, on in enumerate(active)])
        waits = [step for step in range(1, size + 1) if active[(last + step) % size]]
        assert chosen == (last + waits[0]) % size
        last = chosen


@given(LOADS)
def test_fewest_requests(loads: list[tuple[bool, int, int]]) -> None:
    chosen = TotalRequests().choose(request("r"), ranks_of(loads))
    assert loads[chosen][0]
    for rank, (active, requests, _) in enumerate(loads):
        assert not active or (requests, rank) >= (loads[chosen][1], chosen)


@given(LOADS)
def test_fewest_tokens_and_of_those_fewest_requests(loads: list[tuple[bool, int, int]]) -> None:
    chosen = TotalTokens().choose(request("r"), ranks_of(loads))
    assert loads[chosen][0]
    best = (loads[chosen][2], loads[chosen][1], chosen)
    for rank, (active, requests, tokens) in enumerate(loads):
        assert not active or (tokens, requests, rank) >= best


@given(st.integers(0, 2**63 - 1), st.integers(1, 9))
def test_the_room_chooses(room: int, size: int) -> None:
    ranks = [RankLoad(rank, True) for rank in range(size)]
    assert FollowBootstrapRoom().choose(request("r", bootstrap_room=room), ranks) == room % size


def test_without_a_room_there_is_no_rank() -> None:
    with pytest.raises(BadRequest, match="bootstrap_room"):
        FollowBootstrapRoom().choose(request("r"), [RankLoad(0, True)])


@pytest.mark.parametrize("policy", [RoundRobin(), TotalRequests(), TotalTokens()])
def test_no_rank_is_left(policy: RoundRobin) -> None:
    with pytest.raises(Unavailable):
        policy.choose(request("r"), [RankLoad(0, False), RankLoad(1, False)])


def test_auto_follows_the_room_on_a_prefill_server_only() -> None:
    assert make_dispatch_policy("auto").name == "round_robin"
    assert make_dispatch_policy("auto", is_prefill=True).name == "follow_bootstrap_room"
    for name in ("round_robin", "follow_bootstrap_room", "total_requests", "total_tokens"):
        assert make_dispatch_policy(name).name == name
    assert make_dispatch_policy("round_robin") is not make_dispatch_policy("round_robin")


OWN = """
class MostRoom:
    name = "most-room"

    def choose(self, request, ranks):
        return min((rank for rank in ranks if rank.active), key=lambda rank: rank.tokens).rank


class Nameless:
    def choose(self, request, ranks):
        return 0


class Idle:
    name = "idle"
"""


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    policy = make_dispatch_policy(f"{file}:MostRoom")
    ranks = [RankLoad(0, True, 1, 9), RankLoad(1, False, 0, 0), RankLoad(2, True, 7, 5)]
    assert (policy.name, policy.choose(request("r"), ranks)) == ("most-room", 2)
    for wrong, word in ((":MostRom", "MostRoom"), (":Nameless", "name"), (":Idle", "choose")):
        with pytest.raises(ConfigError, match=word) as error:
            make_dispatch_policy(f"{file}{wrong}")
        assert error.value.param == "load_balance_method"


def test_a_mistyped_name_is_told_when_settings_are_made() -> None:
    with pytest.raises(ConfigError, match="round_robin") as error:
        Settings.build(load_balance_method="round_robbin")
    assert error.value.param == "load_balance_method"
    assert (
        Settings.build(load_balance_method="own.py:MostRoom").parallel.load_balance_method
        == "own.py:MostRoom"
    )


def spread(policy: RoundRobin | TotalTokens, lengths: list[int], ranks: int) -> list[int]:
    """Prompt tokens that each rank gets of a burst, by what the budget adds up."""
    budget, source = DPBudget(ranks), SnapshotList(ranks)
    for number, length in enumerate(lengths):
        budget.refresh(source, number)
        believed = [RankLoad(k, True, budget.requests[k], budget.tokens[k]) for k in range(ranks)]
        budget.sent(policy.choose(request("r"), believed), length)
    return budget.tokens


def test_a_heavy_tail_is_spread_evenly_by_tokens_and_not_in_turn() -> None:
    """No prompt has more than a twentieth of all tokens; each rank's share stays within 10 % of the mean."""
    rng = random.Random(7)
    lengths = [min(int(20 * rng.paretovariate(1.1)), 700) for _ in range(200)]
    assert max(lengths) <= sum(lengths) / 20
    worst = {}
    for policy in (TotalTokens(), RoundRobin()):
        tokens = spread(policy, lengths, 4)
        mean = sum(tokens) / 4
        worst[policy.name] = max(abs(each - mean) for each in tokens) / mean
    assert worst["total_tokens"] <= 0.1 < worst["round_robin"]


def test_two_hundred_in_turn_are_fifty_each() -> None:
    policy, ranks = RoundRobin(), [RankLoad(k, True) for k in range(4)]
    assert Counter(policy.choose(request("r"), ranks) for _ in range(200)) == dict.fromkeys(range(4), 50)
