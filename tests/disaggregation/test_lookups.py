"""Looking for the prefill rank of a room: when it is asked again, and when it is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sgviz.disaggregation.bootstrap_client import THREADS, Jobs, put_rank, register_dp_rank
from sgviz.disaggregation.bootstrap_server import BootstrapServer
from sgviz.disaggregation.lookups import AT_ONCE, RETRY_NS, TRIES, Lookups
from sgviz.disaggregation.receiver import Asked, Receiver
from sgviz.disaggregation.wire import RankRoute
from sgviz.errors import SgvizError
from sgviz.events.clock import VirtualClock

SECOND = 10**9


class AtOnce:
    """Jobs that are done when they are submitted."""

    def __init__(self) -> None:
        self.count = 0

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        self.count += 1
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future


class Desk:
    """Lookups at a server of two ranks."""

    def __init__(self, server: BootstrapServer) -> None:
        self.at = server.host, server.port
        self.jobs, self.clock, self.told = AtOnce(), VirtualClock(SECOND), 0
        self.lookups = Lookups(cast(Jobs, self.jobs), self.clock, self._tell)

    def _tell(self) -> None:
        self.told += 1

    def ranks(self, *, follow: bool) -> None:
        for rank in range(2):
            route = RankRoute(
                dp_rank=rank, dp_size=2, rank_ip="127.0.0.1", rank_port=1 + rank, heart_port=3 + rank, page_size=1,
                tag="mock", wire_bytes=8, follow_bootstrap_room=follow,
            )  # fmt: skip
            put_rank(*self.at, route)

    def begin(self, room: int, rank: int | None = None, port: int | None = None) -> Receiver:
        asked = Asked(rid="r", room=room, host=self.at[0], port=port or self.at[1], rank=rank)
        receiver = cast(Receiver, SimpleNamespace(asked=asked, open=True, untold=False))
        self.lookups.begin(receiver)
        return receiver


@pytest.fixture
def desk() -> Iterator[Desk]:
    server = BootstrapServer()
    yield Desk(server)
    server.close()


def test_the_room_or_the_request_names_the_rank(desk: Desk) -> None:
    desk.ranks(follow=True)
    asked = [desk.begin(room, rank) for room, rank in ((6, None), (7, None), (6, 1), (7, 0))]
    found, failed = desk.lookups.look()
    assert [(receiver, route.dp_rank) for receiver, route in found] == list(zip(asked, (0, 1, 1, 0)))
    assert not failed and desk.told == 4 and desk.lookups.look() == ([], [])


def test_a_room_that_is_not_known_yet_is_asked_for_soon_and_then_less_often(desk: Desk) -> None:
    desk.ranks(follow=False)
    receiver = desk.begin(9)
    asked_at = [0]
    while desk.clock.now() < 5 * SECOND:
        assert desk.lookups.look() == ([], [])
        desk.clock.advance(SECOND // 1000)
        if desk.jobs.count > len(asked_at):
            asked_at.append(desk.clock.now() - SECOND)
    waits = [(late - early) / SECOND for early, late in itertools.pairwise(asked_at)]
    assert waits[0] < 0.05 and waits == sorted(waits) and 0.9 < waits[-1] < 1.1
    register_dp_rank(*desk.at, 9, 1)
    found: list[tuple[Receiver, RankRoute]] = []
    for _ in range(3):  # an answer of before may be on its way
        found += desk.lookups.look()[0]
        desk.clock.advance(RETRY_NS)
    assert [(each, route.dp_rank) for each, route in found] == [(receiver, 1)]


def test_a_rank_that_is_not_there_is_asked_for_once(desk: Desk) -> None:
    desk.ranks(follow=True)
    receiver = desk.begin(9, 2)
    assert desk.lookups.look() == (
        [],
        [(receiver, f"prefill rank 2 is not one of the 2 of 127.0.0.1:{desk.at[1]}")],
    )
    assert desk.jobs.count == 1


def test_a_server_whose_ranks_are_not_all_in_is_asked_every_second(desk: Desk) -> None:
    receiver = desk.begin(9)
    for tries in range(1, TRIES):
        assert desk.lookups.look() == ([], [])
        desk.clock.advance(RETRY_NS - 1)
        assert desk.lookups.look() == ([], []) and desk.jobs.count == tries
        desk.clock.advance(1)
        found, failed = desk.lookups.look()
        assert desk.jobs.count == tries + 1 and not found and bool(failed) is (tries + 1 == TRIES)
    ((who, why),) = failed
    assert who is receiver and "0 prefill ranks" in why and f"tried {TRIES} times" in why


def test_who_gave_up_is_asked_for_no_more(desk: Desk) -> None:
    desk.ranks(follow=False)
    receiver = desk.begin(9)
    receiver.open = False  # type: ignore[misc]
    desk.clock.advance(2 * SECOND)
    assert desk.lookups.look() == ([], [])
    count = desk.jobs.count
    desk.clock.advance(2 * SECOND)
    assert desk.lookups.look() == ([], []) and desk.jobs.count == count


class Held(AtOnce):
    """Jobs that are done when the test says so; by port, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Future[Any]] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        self.count += 1
        self.open.append(Future())
        return self.open[-1]


def test_a_server_that_swallows_packets_holds_up_nobody_elses_lookups() -> None:
    """And who waits for it gives up as soon as if it had asked alone."""
    jobs, clock = Held(), VirtualClock(SECOND)
    lookups = Lookups(cast(Jobs, jobs), clock, lambda: None)

    def begin(room: int, port: int) -> Receiver:
        asked = Asked(rid="r", room=room, host="h", port=port, rank=None)
        receiver = cast(Receiver, SimpleNamespace(asked=asked, open=True, untold=False))
        lookups.begin(receiver)
        return receiver

    dead = [begin(room, 1) for room in range(40)]
    assert len(jobs.open) == AT_ONCE < THREADS
    good = begin(50, 2)
    assert len(jobs.open) == AT_ONCE + 1
    jobs.open[-1].set_result("its route")
    assert lookups.look() == ([(good, "its route")], [])
    lost: list[Receiver] = []
    for tries in range(1, TRIES + 1):
        assert not lost and jobs.count == tries * AT_ONCE + 1
        for job in jobs.open:
            if not job.done():
                job.set_exception(SgvizError("no answer"))
        found, failed = lookups.look()
        assert not found and all(why == f"no answer (tried {TRIES} times)" for _, why in failed)
        lost += [receiver for receiver, _ in failed]
        clock.advance(RETRY_NS)
        lookups.look()
    assert lost == dead and lookups.look() == ([], [])


def test_who_gave_up_keeps_its_place_until_its_try_has_ended() -> None:
    jobs, clock = Held(), VirtualClock(SECOND)
    lookups = Lookups(cast(Jobs, jobs), clock, lambda: None)
    for room in range(9):
        asked = Asked(rid="r", room=room, host="h", port=1, rank=None)
        receiver = cast(Receiver, SimpleNamespace(asked=asked, open=True, untold=False))
        lookups.begin(receiver)
        receiver.open = False  # type: ignore[misc]
        lookups.look()
    assert jobs.count == AT_ONCE
