"""How evenly prompts are spread: what total_tokens promises on any stream, and that the controller keeps it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from dp_rig import Rig, request
from hypothesis import given
from hypothesis import strategies as st

from sgviz.data_parallel.budget import THROTTLE_NS, DPBudget
from sgviz.data_parallel.load_snapshots import SnapshotList
from sgviz.data_parallel.policies import DispatchPolicy, RankLoad, RoundRobin, TotalRequests, TotalTokens
from sgviz.engine import Engine
from sgviz.events.schema import DpChose
from sgviz.messages.parallel import LoadSnapshot
from sgviz.workload import heavy_tail

RANKS, REQUESTS, SEEDS = 4, 200, 100


def stream(seed: int, share: float = 0.05) -> list[int]:
    made = heavy_tail(num_requests=REQUESTS, output_tokens=1, largest_share=share, seed=seed)
    return [each.prompt_tokens for each in made.requests]


def spread(policy: DispatchPolicy, lengths: Sequence[int], ranks: int = RANKS) -> list[int]:
    """Prompt tokens that each rank gets of a burst, by policy and budget alone."""
    budget, source = DPBudget(ranks), SnapshotList(ranks)
    for number, length in enumerate(lengths):
        budget.refresh(source, number)
        believed = [RankLoad(k, True, budget.requests[k], budget.tokens[k]) for k in range(ranks)]
        budget.sent(policy.choose(request("r"), believed), length)
    return budget.tokens


def worst(tokens: Sequence[int]) -> float:
    """The largest distance from the mean, as a share of it."""
    mean = sum(tokens) / len(tokens)
    return max(abs(each - mean) for each in tokens) / mean


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=80), st.integers(1, 8))
def test_on_any_stream_no_rank_is_further_from_the_mean_than_the_longest_prompt_allows(
    lengths: list[int], ranks: int
) -> None:
    """Each goes to the rank with fewest, so two ranks never differ by more than one prompt."""
    tokens = spread(TotalTokens(), lengths, ranks)
    assert sum(tokens) == sum(lengths) and max(tokens) - min(tokens) <= max(lengths)
    assert worst(tokens) <= (ranks - 1) * max(lengths) / sum(lengths) + 1e-9


def test_ten_percent_cannot_be_promised_where_the_longest_prompt_has_a_twentieth() -> None:
    """All fits evenly until the longest comes last: the 15 % of four ranks are met exactly."""
    lengths = [*([1] * 380), 20]
    assert max(lengths) / sum(lengths) == 0.05
    assert worst(spread(TotalTokens(), lengths)) == pytest.approx(0.15)


def test_heavy_tails_are_spread_within_a_tenth_mostly_and_always_far_better_than_in_turn() -> None:
    by_tokens = [worst(spread(TotalTokens(), stream(seed))) for seed in range(SEEDS)]
    in_turn = [worst(spread(RoundRobin(), stream(seed))) for seed in range(SEEDS)]
    assert max(by_tokens) <= 0.15
    assert sum(each <= 0.10 for each in by_tokens) >= 0.8 * SEEDS
    assert sum(by_tokens) / SEEDS < 0.06 < 0.2 < sum(in_turn) / SEEDS
    assert sum(tokens < turn for tokens, turn in zip(by_tokens, in_turn)) >= 0.95 * SEEDS


def test_with_prompts_of_a_thirtieth_at_most_a_tenth_is_kept_always() -> None:
    by_tokens = [worst(spread(TotalTokens(), stream(seed, 1 / 30))) for seed in range(SEEDS)]
    assert max(by_tokens) <= 0.10


@given(st.integers(0, 1000), st.data())
def test_ranks_in_the_middle_of_a_forward_do_not_make_the_controller_forget(
    seed: int, data: st.DataObject
) -> None:
    """Ranks take their inboxes and tell their loads whenever they get round to it; the spread is that of the policy."""
    lengths = stream(seed)[:60]
    rig, rng = Rig(RANKS, TotalTokens()), random.Random(data.draw(st.integers(0, 1000)))
    taken = [0] * RANKS
    for number, length in enumerate(lengths):
        rig.send(request(f"r{number}", length))
        rig.clock.advance(rng.randrange(THROTTLE_NS))
        rank, told = rng.randrange(RANKS), rig.ranks
        if rng.random() < 0.5:
            taken[rank] = rng.randint(taken[rank], len(told[rank].messages))
        held = [len(message.input_ids) for message in told[rank].messages[: taken[rank]]]
        rig.loads.put(
            LoadSnapshot(
                timestamp=rig.clock.now(), dp_rank=rank, num_running_reqs=len(held), num_used_tokens=sum(held),
                num_taken_reqs=taken[rank],
            )
        )  # fmt: skip
    given_to = [sum(len(message.input_ids) for message in box.messages) for box in rig.ranks]
    assert given_to == spread(TotalTokens(), lengths)


def test_two_hundred_in_turn_are_fifty_each_whatever_ranks_tell() -> None:
    rig = Rig(RANKS, RoundRobin())
    rig.loads.put(LoadSnapshot(timestamp=1, dp_rank=2, num_used_tokens=10**6))
    rig.send(*[request(f"r{number}", length) for number, length in enumerate(stream(7))])
    assert [len(box.messages) for box in rig.ranks] == [50] * RANKS


@pytest.mark.parametrize("policy", [RoundRobin(), TotalRequests(), TotalTokens()])
@given(st.integers(1, 6), st.integers(1, 8))
def test_tied_ranks_get_the_same_number_each(policy: DispatchPolicy, ranks: int, rounds: int) -> None:
    """Also right after the start, when no rank has told anything yet."""
    rig = Rig(ranks, type(policy)())
    rig.send(*[request(f"r{number}", 5) for number in range(ranks * rounds)])
    assert [len(box.messages) for box in rig.ranks] == [rounds] * ranks
    assert [body.rank for body in rig.bodies(DpChose)] == list(range(ranks)) * rounds


def test_two_hundred_at_once_over_four_ranks_that_work_are_within_a_tenth_by_tokens() -> None:
    """A whole engine, whose ranks tell their loads while the requests come and none of them has ended."""
    made = heavy_tail(num_requests=REQUESTS, output_tokens=1, longest=1500, seed=1)
    forever = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}

    async def burst(engine: Engine) -> list[int]:
        asked = [
            asyncio.create_task(
                engine.async_generate(None, forever, input_ids=made.ids_of(each, 200), rid=each.rid)
            )
            for each in made.requests
        ]
        async with asyncio.timeout(60):
            while len(chosen := choices(engine)) < REQUESTS:
                await asyncio.sleep(0.05)
            while not all(task.done() for task in asked):
                for each in made.requests:
                    engine.abort(each.rid)
                await asyncio.sleep(0.05)
        ended = [task.result()["meta_info"]["finish_reason"]["type"] for task in asked]
        assert set(ended) == {"abort"}  # so none was done before the last was sent
        return [sum(body.prompt_tokens for body in chosen if body.rank == rank) for rank in range(RANKS)]

    settings = {"model": "tiny-llama", "device": "mock", "mock_step_ms": 20.0, "disable_radix_cache": True}
    with Engine(**settings, dp_size=RANKS, load_balance_method="total_tokens") as engine:
        tokens = asyncio.run(burst(engine))
    lengths = [each.prompt_tokens for each in made.requests]
    assert worst(tokens) <= 0.10 < worst(spread(RoundRobin(), lengths))


def choices(engine: Engine) -> list[DpChose]:
    return [event.body for event in engine.pipeline.ring.snapshot() if isinstance(event.body, DpChose)]
