"""Loads of ranks on other hosts: they end up where those of this host's ranks do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))

from free_ports import free_row

from sgviz.data_parallel.load_snapshots import SnapshotFile
from sgviz.data_parallel.nodes import tcp
from sgviz.data_parallel.zmq_snapshots import KEPT, SnapshotReceiver, SnapshotSender
from sgviz.messages.parallel import LoadSnapshot


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.term()


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.01)


def test_the_newest_of_each_rank_arrives_and_of_no_other(tmp_path: Path, context: zmq.Context[Any]) -> None:
    slots = SnapshotFile.create(str(tmp_path / "loads"), 4)
    slots.put(LoadSnapshot(timestamp=1, dp_rank=0, num_used_tokens=5))
    address = tcp("127.0.0.1", free_row(1))
    receiver = SnapshotReceiver(context, address, slots, (2, 3))
    senders = [SnapshotSender(context, address) for _ in range(2)]
    senders[0].put(LoadSnapshot(timestamp=9, dp_rank=0, num_used_tokens=9))  # that rank is not there
    senders[0]._socket.send(b"junk")
    for stamp in (1, 2, 3):
        for rank, sender in zip((2, 3), senders):
            sender.put(LoadSnapshot(timestamp=stamp, dp_rank=rank, num_used_tokens=10 * rank + stamp))
    eventually(lambda: all(getattr(slots.read(rank), "timestamp", 0) == 3 for rank in (2, 3)))
    assert [getattr(slots.read(rank), "num_used_tokens", None) for rank in range(4)] == [5, None, 23, 33]
    for each in (*senders, receiver, slots):
        each.close()


def test_a_rank_without_a_controller_is_not_held_up(context: zmq.Context[Any]) -> None:
    sender = SnapshotSender(context, tcp("127.0.0.1", free_row(1)))
    for stamp in range(10 * KEPT):
        sender.put(LoadSnapshot(timestamp=stamp, dp_rank=1))
    sender.close()
