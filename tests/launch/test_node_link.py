"""Desk and link over real sockets, without schedulers: joining, clocks, both ways of losing each other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

sys.path.append(str(Path(__file__).resolve().parent))

from free_ports import free_row

import sgviz
from sgviz.channel import PortArgs
from sgviz.config import Settings
from sgviz.data_parallel.nodes import addresses_of, meeting_address
from sgviz.errors import StartupError
from sgviz.launch.messages import InitInfo
from sgviz.launch.node_desk import NodeDesk
from sgviz.launch.node_link import NodeLink
from sgviz.launch.node_messages import Beat, ComponentDied, Join, NodeReady

INFO = InitInfo(component="scheduler-1", pid=7, unix_ns=1, monotonic_ns=2, max_req_len=5)


class Two:
    """Node 0's desk, and links of node 1 as they are wanted."""

    def __init__(self, stack: ExitStack, **given: Any) -> None:
        limits = {"node_timeout": 20.0, "node_heartbeat_timeout": 1.0, **given}
        self.given = {"nnodes": 2, "dp_size": 2, "dist_init_addr": f"127.0.0.1:{free_row(6)}", **limits}
        self.settings = Settings.build(**self.given)
        self.stack = stack
        self.zmq: zmq.Context[Any] = zmq.Context()
        stack.callback(self.zmq.term)
        ports, folder = PortArgs.for_processes(addresses_of(self.settings.parallel))
        stack.callback(folder.cleanup)
        self.desk = NodeDesk(self.zmq, self.settings, ports, {"page_size": 1})
        self._closed = False
        stack.callback(self.close)
        self.deaths: list[tuple[str, str]] = []
        self.ends: list[str | None] = []

    def close(self, why: str | None = None) -> None:
        if not self._closed:
            self._closed = True
            self.desk.close(why)

    def link(self, **agree: int) -> NodeLink:
        settings = Settings.build(**self.given, node_rank=1)
        link = NodeLink(self.zmq, settings, {"page_size": 1, **agree})
        self.stack.callback(link.close, "the test is over")
        return link

    def joined(self) -> NodeLink:
        link = self.link()
        link.join()
        link.start(self.ends.append)
        link.tell(NodeReady(infos=[INFO]))
        assert self.desk.wait_ready(lambda: None) == {"scheduler-1": INFO}
        self.desk.watch(lambda component, how: self.deaths.append((component, how)))
        return link


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.02)


def test_a_node_joins_and_hears_where_all_is(stack: ExitStack) -> None:
    two = Two(stack)
    link = two.link()
    welcome = link.join()
    first = int(two.given["dist_init_addr"].rpartition(":")[2])
    plan = [f"tcp://127.0.0.1:{first + n}" for n in range(1, 6)]
    found = welcome.addresses
    assert [found.tokenizer, found.detokenizer, found.events, found.loads, found.ranks[1]] == plan
    assert link.clock_shift_ns() == 0  # one host, one clock


def test_a_node_may_come_first(stack: ExitStack) -> None:
    row = free_row(6)
    settings = Settings.build(
        nnodes=2, dp_size=2, dist_init_addr=f"127.0.0.1:{row}", node_rank=1, node_timeout=20.0
    )
    context: zmq.Context[Any] = zmq.Context()
    stack.callback(context.term)
    link = NodeLink(context, settings, {})
    stack.callback(link.close, "the test is over")
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(link.join()))
    waiting.start()
    time.sleep(0.2)  # it has asked once already
    ports, folder = PortArgs.for_processes(addresses_of(settings.parallel))
    stack.callback(folder.cleanup)
    desk = NodeDesk(context, settings, ports, {})
    stack.callback(desk.close, None)
    waiting.join(20)
    assert found


def test_settings_that_differ_end_both(stack: ExitStack) -> None:
    two = Two(stack)
    with pytest.raises(StartupError, match=r"refused this node: it has page_size 16 \(node 0 has 1\)"):
        two.link(page_size=16).join()
    with pytest.raises(StartupError, match=r"node 1 does not fit: it has page_size 16"):
        two.desk.wait_ready(lambda: None)


def test_a_node_that_does_not_come_is_named(stack: ExitStack) -> None:
    two = Two(stack, node_timeout=0.3)
    with pytest.raises(StartupError, match=r"node 1 did not join at 127.*within 0\.3 s \(node_timeout\)"):
        two.desk.wait_ready(lambda: None)


def test_a_node_zero_that_does_not_answer_is_named(stack: ExitStack) -> None:
    two = Two(stack, node_timeout=0.3)
    two.close()
    with pytest.raises(StartupError, match=r"node 0 at 127.* did not answer within 0\.3 s \(node_timeout\)"):
        two.link().join()


def test_who_waits_hears_of_a_failure_here(stack: ExitStack) -> None:
    def fail() -> None:
        raise StartupError("the detokenizer died")

    with pytest.raises(StartupError, match="the detokenizer died"):
        Two(stack).desk.wait_ready(fail)


def test_a_dead_scheduler_is_told(stack: ExitStack) -> None:
    two = Two(stack)
    two.joined().tell(ComponentDied(component="scheduler-1", how="signal SIGKILL"))
    eventually(lambda: two.deaths == [("scheduler-1", "signal SIGKILL")])


def test_a_node_that_leaves_is_told(stack: ExitStack) -> None:
    two = Two(stack)
    two.joined().close("it was stopped")
    eventually(lambda: two.deaths == [("scheduler-1", "node 1 ended: it was stopped")])


@pytest.mark.parametrize(("why", "said"), [(None, [None]), ("its start failed", "its start failed")])
def test_the_end_of_node_zero_is_told(stack: ExitStack, why: str | None, said: object) -> None:
    two = Two(stack)
    two.joined()
    two.close(why)
    eventually(lambda: two.ends)
    assert two.ends == said or (isinstance(said, str) and said in str(two.ends[0]))
    assert two.deaths == []


def test_a_silent_node_is_lost(stack: ExitStack) -> None:
    two = Two(stack)
    mute = two.zmq.socket(zmq.DEALER)
    stack.callback(mute.close, 0)
    mute.connect(meeting_address(two.settings.parallel))
    words = (
        Join(node_rank=1, version=sgviz.__version__, agree={"page_size": 1}),
        NodeReady(infos=[INFO]),
        Beat(),
    )
    for word in words:
        mute.send(msgspec.msgpack.encode(word))
    two.desk.wait_ready(lambda: None)
    two.desk.watch(lambda component, how: two.deaths.append((component, how)))
    eventually(lambda: two.deaths == [("scheduler-1", "node 1 gave no sign of life for 1 s")])


def test_a_silent_node_zero_is_lost(stack: ExitStack) -> None:
    two = Two(stack)
    link = two.link()
    link.join()
    two.close("gone")
    while link._receive(0.3) is not None:  # its last word among others: the link has not begun to listen
        pass
    link.start(two.ends.append)
    eventually(lambda: two.ends)
    assert two.ends == [f"node 0 at {two.given['dist_init_addr']} gave no sign of life for 1 s"]


def test_bytes_of_strangers_change_nothing(stack: ExitStack) -> None:
    two = Two(stack)
    stranger = two.zmq.socket(zmq.DEALER)
    stack.callback(stranger.close, 0)
    stranger.connect(meeting_address(two.settings.parallel))
    for junk in (b"", b"junk", msgspec.msgpack.encode({"type": "Join"})):
        stranger.send(junk)
    two.joined()
    assert two.deaths == [] and two.ends == []
