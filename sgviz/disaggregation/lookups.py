"""Lookups: which rank of a prefill server has a room, and how it is reached; asked again until it is known.

Nothing waits: jobs run beside, `look` takes what has come. A server that does not answer is given up after 15 tries, a
second apart and of at most 2 s each; one that does not know the room is asked until the bootstrap timeout.
Each request asks anew, so that a server that was started again is found at once; a try that gets no answer counts for
all who wait for that server.
Mirrors the bootstrap of SGLang's CommonKVReceiver. Imports: disaggregation, errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from sgviz.disaggregation.bootstrap_client import Jobs, get_rank, get_server, query_dp_rank
from sgviz.disaggregation.receiver import Receiver
from sgviz.disaggregation.wire import RankRoute
from sgviz.errors import SgvizError
from sgviz.events.clock import Clock

Address = tuple[str, int]
TRIES, RETRY_NS = 15, 10**9
AT_ONCE = 2  # tries at one server: one that swallows packets must leave threads for the others
SOON_NS = 10**7  # the first wait for a room that is about to be known; each further one is twice as long


class NotYet(SgvizError):
    """The server has not heard of the room's rank."""


class NoSuchRank(SgvizError):
    """Nor will there be."""


def find(host: str, port: int, room: int, rank: int | None) -> RankRoute:
    """Ask for everything that is needed to reach the rank that has `room`. Raises SgvizError."""
    server = get_server(host, port)
    if rank is None and server.dp_size == 1:
        rank = 0
    elif rank is None and server.follow_bootstrap_room:
        rank = room % server.dp_size
    elif rank is None:
        rank = query_dp_rank(host, port, room)
    if rank is None:
        raise NotYet(f"bootstrap server {host}:{port} knows of no rank that has bootstrap_room {room}")
    if not 0 <= rank < server.dp_size:
        raise NoSuchRank(f"prefill rank {rank} is not one of the {server.dp_size} of {host}:{port}")
    return get_rank(host, port, rank)


@dataclass(slots=True)
class _Lookup:
    """`tries`: answers until now that did not help. `job`: the try under way."""

    receiver: Receiver
    job: Future[RankRoute] | None = None
    tries: int = 0
    due_ns: int = 0

    @property
    def at(self) -> Address:
        return self.receiver.asked.host, self.receiver.asked.port

    @property
    def wanted(self) -> bool:
        """Somebody waits for the answer, or has to tell its end there."""
        return self.receiver.open or self.receiver.untold

    @property
    def running(self) -> bool:
        return self.job is not None and not self.job.done()


class Lookups:
    """Those under way, in the order in which they began. `tell`: called on any thread when there is an answer."""

    def __init__(self, jobs: Jobs, clock: Clock, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._jobs = jobs
        self._clock = clock
        self._open: list[_Lookup] = []

    def begin(self, receiver: Receiver) -> None:
        self._open.append(_Lookup(receiver))
        self._try_due()

    def look(self) -> tuple[list[tuple[Receiver, RankRoute]], list[tuple[Receiver, str]]]:
        """Who was found since, and who never will be, and why."""
        found: list[tuple[Receiver, RankRoute]] = []
        failed: list[tuple[Receiver, str]] = []
        self._take(found, failed)
        self._try_due()
        self._take(found, failed)  # a try may be over at once
        return found, failed

    def _take(self, found: list[tuple[Receiver, RankRoute]], failed: list[tuple[Receiver, str]]) -> None:
        """What the tries that are over say."""
        silent: dict[Address, BaseException] = {}
        for lookup in self._open:
            job = lookup.job
            if job is None or not job.done():
                continue
            lookup.job, error = None, job.exception()
            if not lookup.wanted:
                continue
            if error is None:
                found.append((lookup.receiver, job.result()))
            elif isinstance(error, NoSuchRank):
                failed.append((lookup.receiver, error.message))
            elif isinstance(error, NotYet):
                lookup.tries += 1
                lookup.due_ns = self._clock.now() + min(SOON_NS << min(lookup.tries, 10), RETRY_NS)
            else:
                silent[lookup.at] = error
        failed += self._count(silent)
        ended = {id(receiver) for receiver, _ in [*found, *failed]}
        self._open = [
            each for each in self._open if each.running or (each.wanted and id(each.receiver) not in ended)
        ]

    def _count(self, silent: Mapping[Address, BaseException]) -> list[tuple[Receiver, str]]:
        """A failed try is one of all who wait for that server; those who have had their last."""
        failed: list[tuple[Receiver, str]] = []
        now = self._clock.now()
        for lookup in self._open:
            error = silent.get(lookup.at)
            if error is None or lookup.job is not None or lookup.due_ns > now or not lookup.wanted:
                continue
            lookup.tries, lookup.due_ns = lookup.tries + 1, now + RETRY_NS
            if lookup.tries >= TRIES:
                failed.append((lookup.receiver, f"{error} (tried {lookup.tries} times)"))
        return failed

    def _try_due(self) -> None:
        """Begin the tries that are due, few at a time at one server."""
        now = self._clock.now()
        running = Counter(each.at for each in self._open if each.running)
        for lookup in self._open:
            if lookup.job is None and lookup.wanted and lookup.due_ns <= now and running[lookup.at] < AT_ONCE:
                self._try(lookup)
                running[lookup.at] += lookup.running

    def _try(self, lookup: _Lookup) -> None:
        asked = lookup.receiver.asked
        lookup.job = self._jobs.submit(lambda: find(asked.host, asked.port, asked.room, asked.rank))
        lookup.job.add_done_callback(lambda _: self._tell())
