"""The pair of `pair_rig` with the real managers between its sides: sockets, shared memory, a bootstrap server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from pair_rig import Pair, SideRig

from sgviz.config import Settings
from sgviz.disaggregation import DecodeManager, PrefillManager
from sgviz.disaggregation.bootstrap_server import BootstrapServer
from sgviz.disaggregation.protocol import KVManager
from sgviz.events import Tracer
from sgviz.events.clock import VirtualClock
from sgviz.recording import Header, Recording
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker

SECOND = 10**9
PIECE_TOKENS = 16
Managers = tuple[PrefillManager, DecodeManager]


class Net:
    """What managers need of the world: a bootstrap server, sockets, and the clock of the time limits."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.server, self.context, self.clock = BootstrapServer(), zmq.Context(), VirtualClock(SECOND)
        self.made: list[KVManager] = []

    def prefill(self, worker: MockWorker) -> PrefillManager:
        at = self.server.host, self.server.port
        manager = PrefillManager(
            self.settings, worker, self.context, self.clock, Tracer("scheduler", None), bootstrap=at,
            piece_tokens=PIECE_TOKENS, threaded=False,
        )  # fmt: skip
        self.made.append(manager)
        return manager

    def decode(self, worker: MockWorker) -> DecodeManager:
        trace = Tracer("scheduler", None)
        manager = DecodeManager(self.settings, worker, self.context, self.clock, trace, threaded=False)
        self.made.append(manager)
        return manager

    def close(self) -> None:
        for manager in self.made:
            manager.close()
        self.server.close()
        self.context.destroy(linger=0)


class SocketPair(Pair):
    """`settle`, `turn_until`, `pass_time`; a side that is not turned is as good as dead."""

    def __init__(self, net: Net, **settings: Any) -> None:
        self.net = net
        self.of_prefill: PrefillManager
        self.of_decode: DecodeManager

        def managers(source: MockWorker, target: MockWorker) -> Managers:
            self.of_prefill, self.of_decode = net.prefill(source), net.decode(target)
            return self.of_prefill, self.of_decode

        super().__init__(managers=managers, peer=(net.server.host, net.server.port), **settings)
        self._share_tracers()

    def _share_tracers(self) -> None:
        """As in a server: one tracer a scheduler."""
        for manager, side in zip((self.of_prefill, self.of_decode), self.sides):
            manager._trace = side.state.trace

    @property
    def idle(self) -> bool:
        """Both sides have nobody, expect nothing, and have told everything."""
        sides = all(side.state.is_fully_idle and not side.inbox.messages for side in self.sides)
        return sides and not (self.of_prefill.busy or self.of_decode.busy)

    def turn_until(self, condition: Callable[[], bool], sides: str = "pd", most_s: float = 20.0) -> None:
        """Turn the sides that live until something holds; sockets and threads take a moment."""
        deadline = time.monotonic() + most_s
        while not condition():
            self._turn(sides)
            assert time.monotonic() < deadline, f"it did not come to that: {self.account()}"

    def settle(self) -> None:
        """Turn until both are idle; then nothing is held anywhere."""
        self.turn_until(lambda: self.idle)
        self.run()
        self.check_empty()

    def pass_time(self, seconds: float, sides: str = "pd", step: float = 1.0) -> None:
        """Let the clock of the time limits go on, the living sides turning all the while."""
        for _ in range(round(seconds / step)):
            self.net.clock.advance(round(step * SECOND))
            for _ in range(4):
                self._turn(sides)
            if sides == "pd":  # sockets are real, the clock is not: the signs of life take their time
                self.turn_until(self._in_touch)

    def _in_touch(self) -> bool:
        """Each side has heard of the other lately."""
        prefill, decode = self.of_prefill, self.of_decode
        heard = [decode._links.heart.heard(link.identity) for link in decode._links]
        heard += [prefill._peers.heart.heard(link.identity) for link in decode._links]
        return all(self.net.clock.now() - each <= 7 * SECOND for each in heard if each)

    def _turn(self, sides: str) -> None:
        for name, side in zip("pd", self.sides):
            if name in sides:
                side.until(Stop.RECEIVED)
        time.sleep(0.0002)

    def restart(self, side: str) -> SideRig:
        """A new server in the place of one that is dead, which never turns again; returns that one."""
        dead: SideRig = getattr(self, side)
        worker = self.start_worker[side]()
        if side == "prefill":
            self.of_prefill = self.net.prefill(worker)
            self.prefill = self.start_side[side](worker, self.of_prefill)
        else:
            self.of_decode = self.net.decode(worker)
            self.decode = self.start_side[side](worker, self.of_decode)
            self.decode.is_decode = True
        self._share_tracers()
        return dead

    def recordings(self) -> tuple[Recording, Recording]:
        """Of the prefill and the decode side."""
        prefill, decode = (
            Recording(
                side.ring.snapshot(), Header(configured=side.configured(), clock="virtual"), source=name
            )
            for side, name in zip(self.sides, ("p.sgv", "d.sgv"))
        )
        return prefill, decode

    def check_recordings(self) -> None:
        for rec in self.recordings():
            report = rec.audit()
            assert report.balanced, f"{rec.source}: {report}"

    def account(self) -> object:
        """For a test that failed."""
        queues = [(list(side.state.live), side.state.disagg.counts()) for side in self.sides]
        return queues, [side.state.disagg.draining for side in self.sides]


@contextmanager
def sockets(
    backend: str, overlap: bool = True, *, limits: dict[str, object] | None = None, **settings: object
) -> Iterator[SocketPair]:
    """`limits`: settings of the managers. `settings`: of the pair."""
    own = {"disaggregation_checksum": True, **(limits or {})}
    net = Net(Settings.build(disaggregation_transfer_backend=backend, **own))
    try:
        yield SocketPair(net, overlap=overlap, **settings)
    finally:
        net.close()
    assert not list(Path("/dev/shm").glob(f"sgviz-kv-{os.getpid()}-*"))
