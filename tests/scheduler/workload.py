"""Random workloads: what clients do to a scheduler, as plain values that hypothesis can shrink."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st
from rig import Rig

VOCAB = 97
CONTEXT = 160
EOS_EVERY = 83
HEADS = tuple(tuple((7 * k + 3 * i + i * i) % VOCAB for i in range(64)) for k in range(3))
STOPS = ("b", "xy", "qq", "zab", "m")


@dataclass(frozen=True)
class Submit:
    """`shared` tokens of a common head and a tail of its own."""

    head: int
    shared: int
    tail: int
    seed: int
    max_new: int
    stream: bool
    logprob: bool
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    extra_key: str | None
    priority: int | None = None

    @property
    def ids(self) -> list[int]:
        own = ((self.seed * 31 + i * (i * 7 + 13)) % VOCAB for i in range(self.tail))
        return [*HEADS[self.head][: self.shared], *own]


@dataclass(frozen=True)
class Abort:
    """Ends the `which`-th request, counted from the newest; may be gone already."""

    which: int


@dataclass(frozen=True)
class Run:
    stops: int


@dataclass(frozen=True)
class Flush:
    pass


Step = Submit | Abort | Run | Flush

submits = st.builds(
    Submit,
    head=st.integers(0, 2),
    shared=st.one_of(st.just(0), st.integers(0, 64), st.just(64)),
    tail=st.one_of(st.integers(1, 12), st.integers(1, 40)),
    seed=st.integers(0, 50),
    max_new=st.one_of(st.integers(0, 30), st.integers(30, 45)),
    stream=st.booleans(),
    logprob=st.booleans(),
    ignore_eos=st.sampled_from([False, False, False, True]),
    stop=st.sampled_from([(), (), (), (), ("b",), ("xy", "zab"), ("qq", "m")]),
    stop_ids=st.sampled_from([(), (), (3, 50), (11,)]),
    extra_key=st.sampled_from([None, None, None, "a"]),
    priority=st.sampled_from([None, 0, 5, 10, 20, 40]),
)
runs = st.builds(Run, st.one_of(st.integers(1, 12), st.integers(3, 5)))
aborts = st.builds(Abort, st.integers(0, 9))
# requests that come one by one are admitted against a small reserve, so that memory runs out later
trickle = st.builds(lambda submit, run: [submit, run], submits, runs)
others = st.one_of(submits, aborts, runs, st.builds(Flush)).map(lambda step: [step])
steps: st.SearchStrategy[list[Step]] = st.builds(
    lambda burst, rest: [*burst, *(step for some in rest for step in some)],
    st.lists(submits, min_size=1, max_size=6),
    st.lists(st.one_of(trickle, trickle, others), max_size=16),
)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, object]:
    """Settings of a scheduler whose pool holds a fraction of what the workload wants at once."""
    page = draw(st.sampled_from([1, 4, 16, 64]))
    # the longest request has 104 + 45 tokens: the smallest pools hold little more than one
    tokens = draw(st.sampled_from([192, 192, 256, 384]))
    by_priority = draw(st.booleans())
    policies = ["fcfs", "lof"] if by_priority else ["fcfs", "lpm", "dfs-weight", "lof", "random"]
    return {
        "page_size": page,
        "tokens": max(tokens, 4 * page),
        "chunked_prefill_size": draw(st.sampled_from([-1, 8, 16, 33, 64, 2048])),
        "enable_mixed_chunk": draw(st.booleans()),
        "disable_overlap_schedule": draw(st.booleans()),
        "disable_radix_cache": draw(st.sampled_from([False, False, True])),
        "schedule_policy": draw(st.sampled_from(policies)),
        "enable_priority_scheduling": by_priority,
        "priority_scheduling_preemption_threshold": draw(st.sampled_from([0, 4, 10])),
        "schedule_low_priority_values_first": draw(st.booleans()),
        "disable_priority_preemption": draw(st.sampled_from([False, False, True])),
        "retraction_policy": draw(st.sampled_from(["length", "priority"])) if by_priority else "length",
        "schedule_conservativeness": draw(st.sampled_from([0.001, 0.001, 0.1, 1.0])),
        "max_running_requests": draw(st.sampled_from([None, None, None, 1, 4])),
        "prefill_max_requests": draw(st.sampled_from([None, None, 2])),
        "max_prefill_tokens": draw(st.sampled_from([16384, 48])),
        "stream_interval": draw(st.sampled_from([1, 1, 4])),
    }


def submit(rig: Rig, step: Submit, rid: str) -> None:
    rig.submit(
        step.ids,
        step.max_new,
        rid=rid,
        stream=step.stream,
        logprob=step.logprob,
        ignore_eos=step.ignore_eos,
        stop=step.stop,
        stop_token_ids=step.stop_ids,
        extra_key=step.extra_key,
        priority=step.priority,
    )


def unpressed(requests: dict[str, Submit]) -> Rig:
    """The same requests where nothing is shared, cut, retracted or late."""
    rig = Rig(
        tokens=40_000,
        context_len=CONTEXT,
        vocab_size=VOCAB,
        eos_every=EOS_EVERY,
        events=False,
        disable_radix_cache=True,
        chunked_prefill_size=-1,
        disable_overlap_schedule=True,
    )
    for rid, step in requests.items():
        submit(rig, step, rid)
    rig.run()
    return rig


def most_turns(requests: dict[str, Submit], retractions: int) -> int:
    """Turns that suffice whatever the pressure.

    Every turn with a batch computes a prompt token for good, gives the request with the most output a
    token, or repeats work that a retraction threw away (at most a context's length for each of them).
    The overlap loop adds a late forward for each ending.
    """
    useful = sum(len(step.ids) + step.max_new + 3 for step in requests.values())
    return useful + retractions * (CONTEXT + 2)


def crowd(seed: int, size: int = 20) -> list[Step]:
    """Many long answers that arrive a few steps apart: admission trusts the small reserve, memory runs out."""
    rng = random.Random(seed)
    todo: list[Step] = []
    for _ in range(size):
        todo.append(
            Submit(
                head=rng.randrange(2),
                shared=rng.choice((0, 0, 8, 40)),
                tail=rng.randrange(1, 16) if rng.random() < 0.8 else rng.randrange(40, 70),
                seed=rng.randrange(50),
                max_new=rng.randrange(25, 46),
                stream=rng.random() < 0.5,
                logprob=rng.random() < 0.3,
                ignore_eos=rng.random() < 0.1,
                stop=rng.choice(((), (), (), ("xy", "zab"))),
                stop_ids=(),
                extra_key=rng.choice((None, None, "a")),
                priority=(0, 20, 40)[len(todo) % 3],
            )
        )
        todo.append(Run(rng.randrange(1, 14)))
        if rng.random() < 0.25:
            todo.append(Abort(rng.randrange(6)))
    return todo
