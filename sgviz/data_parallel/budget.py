"""DPBudget: what the controller believes each rank has to do, from its snapshots and from what was sent since.

Mirrors SGLang's DPBudget. Snapshots are looked at once in 20 ms at most: a burst of requests finds the same stale
snapshots, and would pile up on one rank if each of them forgot what was sent just before. What differs: a snapshot of a
rank in the middle of a forward knows nothing of the requests that wait in its inbox. SGLang forgets these with each new
snapshot; here the snapshot tells how many the rank has taken, and those after them still count. Imports: messages.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from sgviz.messages.parallel import LoadSnapshot

THROTTLE_NS = 20_000_000


class LoadSource(Protocol):
    """Where snapshots are read from."""

    def read(self, rank: int) -> LoadSnapshot | None:
        """The newest of that rank; None if there is none, or it is being written right now."""
        ...


class DPBudget:
    """Requests and tokens by rank.

    Attributes:
        requests: running and waiting. tokens: of KV in use, and of the prompts that wait.
    """

    def __init__(self, ranks: int, throttle_ns: int = THROTTLE_NS) -> None:
        self.requests = [0] * ranks
        self.tokens = [0] * ranks
        self._stamps = [0] * ranks
        self._taken = [0] * ranks
        self._under_way: list[deque[int]] = [
            deque() for _ in range(ranks)
        ]  # prompt tokens of those not yet taken
        self._throttle_ns = throttle_ns
        self._refreshed: int | None = None

    def refresh(self, source: LoadSource, now: int) -> bool:
        """Take over what is new in `source` at `now` (ns), unless that was done just before; says whether it looked."""
        if self._refreshed is not None and now - self._refreshed < self._throttle_ns:
            return False
        self._refreshed = now
        for rank in range(len(self.requests)):
            if (snapshot := source.read(rank)) is not None:
                self._take(rank, snapshot)
        return True

    def _take(self, rank: int, snapshot: LoadSnapshot) -> None:
        if snapshot.timestamp == self._stamps[rank]:
            return  # nothing new from it: what was sent since counts on
        self._stamps[rank] = snapshot.timestamp
        ahead = self._not_taken(rank, snapshot.num_taken_reqs)
        self.requests[rank] = snapshot.num_running_reqs + snapshot.num_waiting_reqs + len(ahead)
        self.tokens[rank] = snapshot.num_used_tokens + snapshot.num_waiting_uncached_tokens + sum(ahead)

    def _not_taken(self, rank: int, taken: int) -> deque[int]:
        """Of what was sent to `rank`, what it had not taken when it told that it had taken so many (-1: not told)."""
        ahead, before = self._under_way[rank], self._taken[rank]
        if taken < before:  # it does not tell, or counts from the start again
            ahead.clear()
        for _ in range(min(len(ahead), taken - before)):
            ahead.popleft()
        self._taken[rank] = max(taken, 0)
        return ahead

    def sent(self, rank: int, tokens: int) -> None:
        """A request with so many prompt tokens went to `rank`, which will tell of it later."""
        self.requests[rank] += 1
        self.tokens[rank] += tokens
        self._under_way[rank].append(tokens)
