"""A controller that has nothing to do does nothing, and a start that fails leaves none behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import zmq
from dp_rig import Box, request

from sgviz.channel import Receiver, Sender
from sgviz.data_parallel.controller import DataParallelController
from sgviz.data_parallel.load_snapshots import SnapshotList
from sgviz.data_parallel.policies import RoundRobin
from sgviz.engine import Engine
from sgviz.errors import StartupError
from sgviz.events import RingSink, Tracer
from sgviz.events.tracer import QUIET_MS
from sgviz.messages import ShutdownReq, ToController
from sgviz.worker.mock_worker import MockWorker

QUIET_S = 1.0
ADDRESS = "inproc://idle-controller"


class Counted:
    """An inbox that tells how often a poll came back."""

    def __init__(self, inbox: Receiver[ToController]) -> None:
        self._inbox = inbox
        self.polls = 0

    def drain(self, limit: int = 1024) -> list[ToController]:
        return self._inbox.drain(limit)

    def wait(self, timeout_ms: int) -> bool:
        found = self._inbox.wait(timeout_ms)
        self.polls += 1
        return found


def test_an_idle_controller_stays_in_one_poll_and_tells_nothing() -> None:
    """Not a turn, not a return of its poll, not an event, for as long as no message comes; then it is there."""
    with zmq.Context() as context:
        sender = Sender(context, ADDRESS, bind=True)
        inbox = Counted(Receiver(context, ADDRESS, ToController))
        ring, rank = RingSink(), Box()
        controller = DataParallelController(
            inbox=inbox, ranks=[rank, Box()], to_tokenizer=Box(), to_detokenizer=Box(), policy=RoundRobin(),
            loads=SnapshotList(2), trace=Tracer("data_parallel_controller", ring), one_process=True,
        )  # fmt: skip
        thread = threading.Thread(target=controller.run)
        thread.start()
        sender.send(request("first"))
        while not rank.messages:
            time.sleep(0.001)
        time.sleep(10 * QUIET_MS / 1000)  # it is in the long poll by now
        before = inbox.polls, controller.turn, len(ring.snapshot())
        time.sleep(QUIET_S)
        assert (inbox.polls, controller.turn, len(ring.snapshot())) == before
        sender.send(ShutdownReq())
        thread.join(10)
        assert not thread.is_alive() and inbox.polls == before[0] + 1
        sender.close()
        inbox._inbox.close()


def test_a_start_that_fails_leaves_no_controller_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for ranks to connect; one that failed never will."""
    made: list[Any] = []
    begin = MockWorker.__init__

    def second_fails(self: MockWorker, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        if len(made) == 2:
            raise RuntimeError("no device")
        begin(self, *args, **kwargs)

    monkeypatch.setattr(MockWorker, "__init__", second_fails)
    before = set(threading.enumerate())  # some of which may end meanwhile
    with pytest.raises(StartupError, match="no device"):
        Engine(model="tiny-llama", device="mock", dp_size=2)
    assert set(threading.enumerate()) <= before
