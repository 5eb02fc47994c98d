"""Order of the waiting queue. Mirrors SGLang's SchedulePolicy (facts 5.7).

A policy is any object with a `name` and an `order(waiting, view)` that returns the same requests in
another order; it reads requests and the `PolicyView` and changes neither. Cache-aware policies act as
fcfs without a radix cache, and lpm also with a long queue. One of your own, whole:

    class ShortestPromptFirst:
        name = "shortest-prompt-first"

        def order(self, waiting, view):
            return sorted(waiting, key=lambda req: len(req.origin_input_ids) - view.matched(req))

    Engine(schedule_policy=ShortestPromptFirst())                              # components as threads
    Engine(mode="processes", schedule_policy="my_policies.py:ShortestPromptFirst")     # or module:Class

`sgviz serve --schedule-policy` takes the names too. A policy that raises, drops or doubles a request is
reported (`policy.failed`, and in the log), and that plan is made in order of arrival. With priority scheduling the
priority goes first, and the policy orders those of equal priority.
Imports: batch, cache, events.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, cast

from sgviz.batch.req import Req
from sgviz.cache.radix_cache import RadixCache
from sgviz.errors import ConfigError, suggest
from sgviz.events import Tracer
from sgviz.scheduler.state import SchedulerState
from sgviz.scheduler.user_policy import is_user_policy, load_policy

LPM_QUEUE_LIMIT = 128
IN_BATCH_CHECK_THRESHOLD = 32  # only requests with at most this much cached are compared with each other
IN_BATCH_DEPRIORITIZE_THRESHOLD = 32


class PolicyView:
    """What a policy may look at besides the queue: the cache, the running batch and the clock."""

    __slots__ = ("_state",)

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def running(self) -> Sequence[Req]:
        """The requests that are decoding."""
        return tuple(self._state.running_batch.reqs)

    @property
    def now_ns(self) -> int:
        return self._state.clock.now()

    @property
    def free_tokens(self) -> int:
        """KV tokens that are free or could be freed from the tree."""
        return self._state.cache.room()

    @property
    def page_size(self) -> int:
        return self._state.cache.page_size

    @property
    def cache_enabled(self) -> bool:
        return not self._state.cache.disable_radix_cache

    def matched(self, req: Req) -> int:
        """Tokens of the request that the prefix cache holds now; looking does not change the cache."""
        return self._state.cache.peek(req.fill_ids(), req.namespace, limit=req.seqlen - 1)

    def path(self, req: Req) -> tuple[int, ...]:
        """Ids of the tree nodes that hold the request's cached prefix, from the root downwards."""
        return self._state.cache.peek_path(req.fill_ids(), req.namespace)


class SchedulePolicy(Protocol):
    """Anything that can order the waiting queue."""

    name: str

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        """The same requests, first to be tried first. Called once for every prefill plan."""
        ...


def in_order_of_arrival(waiting: Sequence[Req]) -> list[Req]:
    """First come first; a retracted request came when it was put back. `waiting` itself has the last plan's order."""
    return sorted(waiting, key=lambda req: req.arrival)


class Fcfs:
    """First come, first served."""

    name = "fcfs"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        arrivals = [req.arrival for req in waiting]
        # another order is left where a debugger has changed the policy
        return waiting if arrivals == sorted(arrivals) else in_order_of_arrival(waiting)


class LongestPrefixMatch:
    """Most cached tokens first; of several cold requests with a common head only one goes ahead of the rest."""

    name = "lpm"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        if not view.cache_enabled or len(waiting) > LPM_QUEUE_LIMIT:
            return in_order_of_arrival(waiting)
        matched = [view.matched(req) for req in waiting]
        later = self._repeats(waiting, matched, view.page_size)
        ranked = sorted(range(len(waiting)), key=lambda i: (later[i], -matched[i]))
        return [waiting[i] for i in ranked]

    @staticmethod
    def _repeats(waiting: Sequence[Req], matched: Sequence[int], page_size: int) -> list[bool]:
        """Which requests share a long head with one before them, which will be in the cache next time."""
        scratch = RadixCache(page_size, Tracer("policy", None))
        out = [False] * len(waiting)
        for i, req in enumerate(waiting):
            if matched[i] > IN_BATCH_CHECK_THRESHOLD:
                continue
            ids = req.fill_ids()
            if scratch.peek(ids, req.namespace) >= IN_BATCH_DEPRIORITIZE_THRESHOLD:
                out[i] = True
            else:
                scratch.insert_ids(ids, req.namespace)
        return out


class DfsWeight:
    """Depth-first through the prefix tree, subtrees with many waiting requests first; the uncached come last."""

    name = "dfs-weight"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        if not view.cache_enabled:
            return in_order_of_arrival(waiting)
        paths = [view.path(req) for req in waiting]
        weight: dict[int, int] = {}
        for path in paths:
            for node in path:
                weight[node] = weight.get(node, 0) + 1
        # heavier branches first at every level; at a node its own requests come after those further down
        own = (1, 0)  # behind every branch: those have negative weights
        ranked = sorted(
            range(len(waiting)), key=lambda i: [*((-weight[node], node) for node in paths[i]), own]
        )
        return [waiting[i] for i in ranked]


class LongestOutputFirst:
    """Largest max_new_tokens first."""

    name = "lof"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        return sorted(waiting, key=lambda req: -req.max_new_tokens)


class RandomOrder:
    """A new seeded shuffle for every plan."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        shuffled = list(waiting)
        self._random.shuffle(shuffled)
        return shuffled


_POLICIES: Mapping[str, Callable[[int], SchedulePolicy]] = MappingProxyType({
    "fcfs": lambda seed: Fcfs(),
    "lpm": lambda seed: LongestPrefixMatch(),
    "dfs-weight": lambda seed: DfsWeight(),
    "lof": lambda seed: LongestOutputFirst(),
    "random": RandomOrder,
})  # fmt: skip


def policy_names() -> tuple[str, ...]:
    """The built-in ones."""
    return tuple(_POLICIES)


def make_policy(name: str, seed: int) -> SchedulePolicy:
    """The policy of that name: a built-in one, or the user's own as module:Class or file.py:Class.

    Raises:
        ConfigError: there is none (the nearest name is told), or the user's cannot be loaded.
    """
    if is_user_policy(name):
        return cast(SchedulePolicy, load_policy(name))
    if name not in _POLICIES:
        raise ConfigError(
            f"schedule_policy {name!r} is not one of {', '.join(_POLICIES)}{suggest(name, _POLICIES)}, "
            "nor module:Class or file.py:Class",
            param="schedule_policy",
        )
    return _POLICIES[name](seed)
