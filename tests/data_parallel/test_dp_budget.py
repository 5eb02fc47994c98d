"""DPBudget: what is believed of each rank, against a naive account of the same story."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sgviz.data_parallel.budget import THROTTLE_NS, DPBudget
from sgviz.messages.parallel import LoadSnapshot

RANKS = 3


@dataclass
class Told:
    """Snapshots by rank, and how often somebody looked."""

    newest: dict[int, LoadSnapshot] = field(default_factory=dict)
    looks: int = 0

    def read(self, rank: int) -> LoadSnapshot | None:
        self.looks += 1
        return self.newest.get(rank)


def snapshot(rank: int, timestamp: int, running: int, waiting: int, used: int, queued: int) -> LoadSnapshot:
    return LoadSnapshot(
        timestamp=timestamp, dp_rank=rank, num_running_reqs=running, num_waiting_reqs=waiting,
        num_used_tokens=used, num_waiting_uncached_tokens=queued, num_total_tokens=999,
    )  # fmt: skip


NUMBER = st.integers(0, 50)
STORY = st.lists(
    st.one_of(
        st.tuples(
            st.just("told"), st.integers(0, RANKS - 1), st.integers(1, 4), NUMBER, NUMBER, NUMBER, NUMBER
        ),
        st.tuples(st.just("sent"), st.integers(0, RANKS - 1), st.integers(1, 99)),
        st.tuples(st.just("passed"), st.integers(0, THROTTLE_NS)),
        st.tuples(st.just("refresh")),
    ),
    max_size=40,
)


@given(STORY)
def test_against_a_naive_account(story: list[tuple]) -> None:
    """A rank has what its newest seen snapshot says and what was sent since that was seen."""
    budget, told, now = DPBudget(RANKS), Told(), 0
    seen: list[LoadSnapshot | None] = [None] * RANKS
    since: list[list[int]] = [[] for _ in range(RANKS)]
    looked: int | None = None
    for what, *args in story:
        if what == "told":
            told.newest[args[0]] = snapshot(*args)
        elif what == "sent":
            budget.sent(*args)
            since[args[0]].append(args[1])
        elif what == "passed":
            now += args[0]
        else:
            due = looked is None or now - looked >= THROTTLE_NS
            assert budget.refresh(told, now) is due
            for rank in range(RANKS) if due else ():
                new, old = told.newest.get(rank), seen[rank]
                if new is not None and (old is None or new.timestamp != old.timestamp):
                    seen[rank], since[rank] = new, []
            looked = now if due else looked
        for rank in range(RANKS):
            base = seen[rank]
            requests = base.num_running_reqs + base.num_waiting_reqs if base else 0
            tokens = base.num_used_tokens + base.num_waiting_uncached_tokens if base else 0
            assert budget.requests[rank] == requests + len(since[rank])
            assert budget.tokens[rank] == tokens + sum(since[rank])


def test_a_burst_reads_the_snapshots_once() -> None:
    budget, told = DPBudget(RANKS), Told()
    for number in range(100):
        budget.refresh(told, 1 + number * THROTTLE_NS // 100)
    assert told.looks == RANKS


WAY = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), st.integers(1, 99)),
        st.tuples(st.just("taken"), st.integers(1, 5)),
        st.tuples(st.just("ended"), st.just(0)),
        st.tuples(st.just("told"), st.just(0)),
        st.tuples(st.just("refresh"), st.just(0)),
    ),
    max_size=60,
)


@given(WAY)
def test_what_waits_in_the_inbox_of_a_rank_is_not_forgotten(story: list[tuple[str, int]]) -> None:
    """Every request counts once: with the snapshot if the rank had taken it by then, else by itself."""
    budget, told = DPBudget(1, throttle_ns=0), Told()
    sent: list[int] = []
    held: list[int] = []
    taken = seen_taken = 0
    seen = [0, 0]  # requests and tokens of the newest snapshot that was looked at
    for now, (what, number) in enumerate(story, 1):
        if what == "sent":
            sent.append(number)
            budget.sent(0, number)
        elif what == "taken":
            held += sent[taken : taken + number]
            taken = min(taken + number, len(sent))
        elif what == "ended":
            held = held[1:]
        elif what == "told":
            told.newest[0] = LoadSnapshot(
                timestamp=now, dp_rank=0, num_running_reqs=len(held), num_used_tokens=sum(held),
                num_taken_reqs=taken,
            )  # fmt: skip
        else:
            budget.refresh(told, now)
            if 0 in told.newest:
                newest = told.newest[0]
                seen, seen_taken = [newest.num_running_reqs, newest.num_used_tokens], newest.num_taken_reqs
        later = sent[seen_taken:]
        assert (budget.requests[0], budget.tokens[0]) == (seen[0] + len(later), seen[1] + sum(later))


def test_a_rank_that_counts_from_the_start_again_has_nothing_on_the_way() -> None:
    budget, told = DPBudget(1, throttle_ns=0), Told()
    for _ in range(5):
        budget.sent(0, 10)
    told.newest[0] = LoadSnapshot(timestamp=1, dp_rank=0, num_taken_reqs=3)
    budget.refresh(told, 1)
    assert (budget.requests, budget.tokens) == ([2], [20])
    told.newest[0] = LoadSnapshot(timestamp=2, dp_rank=0, num_taken_reqs=0)
    budget.refresh(told, 2)
    assert (budget.requests, budget.tokens) == ([0], [0])
    budget.sent(0, 7)
    told.newest[0] = LoadSnapshot(timestamp=3, dp_rank=0, num_taken_reqs=1, num_used_tokens=7)
    budget.refresh(told, 3)
    assert budget.tokens == [7]
