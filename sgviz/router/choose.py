"""Who gets a request: a policy for each side of the pair, over the servers that are healthy.

Imports: errors, this folder.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from sgviz.errors import Unavailable
from sgviz.router.servers import Server


class Chooser:
    """Chooses among the servers of one side.

    Policies: `random`, `round_robin`, `least_requests` (equals in turn), `power_of_two` (of two at random the one with
    fewer requests).
    """

    def __init__(self, policy: str, servers: Sequence[Server], rng: random.Random) -> None:
        self._policy, self._servers, self._rng = policy, servers, rng
        self._turn = 0

    def choose(self, without: Collection[str] = ()) -> Server:
        """A healthy server; of those `without`, which failed this request before, only if there is no other.

        Raises:
            Unavailable: none is healthy; says why each is not.
        """
        others = self._candidates(without)
        if self._policy == "random":
            return self._rng.choice(others)
        if self._policy == "power_of_two":
            return min(self._rng.sample(others, min(2, len(others))), key=_load)
        if self._policy == "least_requests":
            fewest = min(map(_load, others))
            others = [server for server in others if server.requests == fewest]
        return self._next_of(others)

    def any_one(self, without: Collection[str] = ()) -> Server:
        """As `choose`, for what is not generated: the least loaded, and nobody's turn is over. Raises as it does."""
        return min(self._candidates(without), key=_load)

    def _candidates(self, without: Collection[str]) -> list[Server]:
        healthy = [server for server in self._servers if server.healthy]
        if not healthy:
            raise Unavailable(_nobody(self._servers))
        return [server for server in healthy if server.url not in without] or healthy

    def _next_of(self, some: Sequence[Server]) -> Server:
        """In the order of all servers, the first of `some` at or behind the turn."""
        size = len(self._servers)
        for step in range(size):
            server = self._servers[(self._turn + step) % size]
            if server in some:
                self._turn = (self._turn + step + 1) % size
                return server
        raise AssertionError("some of the servers are none of the servers")


def _load(server: Server) -> int:
    return server.requests


def _nobody(servers: Sequence[Server]) -> str:
    side = servers[0].side
    return f"no {side} server is healthy: " + "; ".join(f"{server.url}: {server.why}" for server in servers)
