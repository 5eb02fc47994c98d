"""Decode ranks that are lost, told so while they may wait and then forgotten; and one that connects anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from kv_pair import SECOND, Pair, aux, read, write

from sgviz.config import Settings
from sgviz.disaggregation import DecodeManager
from sgviz.disaggregation.heart import connected
from sgviz.disaggregation.limits import Limits
from sgviz.disaggregation.peers import Peers
from sgviz.disaggregation.protocol import KVPoll
from sgviz.events.clock import VirtualClock

SLOTS, IDS = list(range(1, 11)), list(range(100, 110))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(backend="tcp")
    yield made
    made.close()


def known(peers: Peers) -> int:
    """How many names it remembers."""
    return len(peers._met) + len(peers.heart._heard) + len(peers.heart._lost)


def lose(pair: Pair, room: int) -> None:
    """The decode side stops in the middle of a transfer, and another begins in its place."""
    sender, _ = pair.met(room, SLOTS)
    pair.settle()
    pair.clock.advance(13 * SECOND)
    pair.pump(lambda: sender.poll() is KVPoll.FAILED, "p")
    pair.decode.close()  # what it says is not listened to any more
    trace = pair.tracer()
    pair.decode = DecodeManager(pair.settings, pair.target, pair.context, pair.clock, trace, threaded=False)


def test_what_is_known_of_lost_ranks_does_not_grow(pair: Pair) -> None:
    memory = pair.prefill._limits.memory
    assert memory == 150 * SECOND  # bootstrap and waiting
    sizes = []
    for room in range(1, 31):
        lose(pair, room)
        sizes.append(known(pair.prefill._peers))
    assert max(sizes) <= memory // (13 * SECOND) + 2  # those of the last 150 s
    pair.clock.advance(memory + SECOND)
    pair.prefill.pump()
    assert known(pair.prefill._peers) == 0
    sender, receiver = pair.met(31, SLOTS)  # and it goes on serving
    write(pair.source, SLOTS, SLOTS)
    sender.send(0, np.array(SLOTS, dtype=np.int64), aux=aux(31))
    pair.pump(lambda: receiver.poll() is KVPoll.SUCCESS)
    assert read(pair.target, SLOTS) == SLOTS


def test_a_lost_rank_that_goes_on_is_told_so_however_late() -> None:
    """Its signs of life keep the memory of it, although more time passes than it takes to forget."""
    clock, limits = VirtualClock(SECOND), Limits.of(Settings.build().disaggregation)
    pair = Pair(backend="tcp")
    peers = Peers(pair.context, "127.0.0.1", clock, limits, threaded=False)
    socket = connected(pair.context, b"slow", f"tcp://127.0.0.1:{peers.ports[1]}", hwm=0)
    try:
        peers.meet(b"slow", "tcp", clock.now())
        clock.advance(limits.silence + 1)
        assert peers.silent(clock.now()) == [(b"slow", limits.silence + 1)]
        for _ in range(3):
            clock.advance(limits.memory - SECOND)
            socket.send(b"ping")
            until(lambda: beaten(peers) and bool(socket.poll(0)))
            assert socket.recv() == b"lost"
            assert peers.silent(clock.now()) == [] and peers.heart.is_lost(b"slow")
        clock.advance(limits.memory + 1)
        peers.silent(clock.now())
        assert not peers.heart.is_lost(b"slow")
    finally:
        socket.close()
        peers.close()
        pair.close()


def test_who_pings_and_never_names_a_room_is_forgotten(pair: Pair) -> None:
    peers = pair.prefill._peers
    socket = connected(pair.context, b"stranger", f"tcp://127.0.0.1:{peers.ports[1]}", hwm=0)
    socket.send(b"ping")
    until(lambda: beaten(peers) and peers.heart.heard(b"stranger") > 0)
    socket.close()
    pair.clock.advance(pair.prefill._limits.memory + 1)
    pair.prefill.pump()
    assert known(peers) == 0


def until(holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come to that")


def beaten(peers: Peers) -> bool:
    peers.beat()
    return True


def test_a_rank_that_connects_anew_need_not_wait_for_the_end_of_its_old_connection(pair: Pair) -> None:
    """One that broke on the decode side alone: the prefill side's end of it looks alive."""
    pair.met(29, SLOTS)[0].abort("no more")
    pair.settle()
    (link,) = pair.decode._links
    old, link.socket = link.socket, connected(pair.context, link.identity, link.address, hwm=0)
    try:
        write(pair.source, SLOTS, IDS)
        sender, receiver = pair.met(30, SLOTS)
        sender.send(0, np.array(SLOTS, dtype=np.int64), aux=aux(30))
        pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.SUCCESS)
    finally:
        old.close()
    assert read(pair.target, SLOTS) == IDS
