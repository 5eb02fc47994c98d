"""What node 0 knows of other nodes, without sockets and in any time."""

from __future__ import annotations

import re

import pytest

import sgviz
from sgviz.channel import HostAddresses
from sgviz.config import Settings
from sgviz.launch.messages import InitInfo
from sgviz.launch.node_messages import (
    AskClock,
    Beat,
    ComponentDied,
    Join,
    Leaving,
    NodeReady,
    Refused,
    TellClock,
    Welcome,
)
from sgviz.launch.node_table import NodeTable

AGREE = {"page_size": 1, "model": "ab"}
PARALLEL = Settings.build(
    nnodes=3, dp_size=6, dist_init_addr="127.0.0.1:25000", node_heartbeat_timeout=10.0
).parallel
WELCOME = Welcome(
    instance_id="x",
    addresses=HostAddresses(tokenizer="t", detokenizer="d", events="e", loads="l", ranks={}),
)


def join(node: int, agree: dict[str, int | str] | None = None, version: str = sgviz.__version__) -> Join:
    return Join(node_rank=node, version=version, agree={**AGREE, **(agree or {})})


def ready(node: int) -> NodeReady:
    names = [f"scheduler-{rank}" for rank in PARALLEL.ranks_of(node)]
    return NodeReady(infos=[InitInfo(component=name, pid=1, unix_ns=1, monotonic_ns=1) for name in names])


@pytest.fixture
def table() -> NodeTable:
    return NodeTable(PARALLEL, dict(AGREE), WELCOME, now_ns=lambda: 77)


@pytest.fixture
def running(table: NodeTable) -> NodeTable:
    for node, peer in ((1, b"a"), (2, b"b")):
        assert table.take(peer, join(node), 0.0) == WELCOME
        assert table.take(peer, ready(node), 1.0) is None
    assert table.infos is not None and list(table.infos) == [f"scheduler-{rank}" for rank in range(2, 6)]
    return table


def test_a_start_waits_for_all(table: NodeTable) -> None:
    assert table.missing() == [1, 2] and table.infos is None
    table.take(b"b", join(2), 0.0)
    assert table.missing() == [1] and table.unready() == [1, 2] and table.live == [b"b"]
    table.take(b"b", ready(2), 0.0)
    assert table.unready() == [1] and table.infos is None and table.failure is None


def test_a_node_that_did_not_hear_its_welcome_hears_it_again(table: NodeTable) -> None:
    assert table.take(b"a", join(1), 0.0) == table.take(b"a", join(1), 1.0) == WELCOME


def test_the_clock_is_told_to_those_who_joined(table: NodeTable) -> None:
    assert isinstance(table.take(b"a", AskClock(sent_ns=5), 0.0), Refused)
    table.take(b"a", join(1), 0.0)
    assert table.take(b"a", AskClock(sent_ns=5), 0.0) == TellClock(sent_ns=5, now_ns=77)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (join(1, {"page_size": 16}), r"page_size 16 \(node 0 has 1\)"),
        (join(1, {"model": "cd"}), "another model"),
        (join(1, version="0.0.1"), r"sgviz 0\.0\.1"),
        (join(3), "node_rank is 3"),
        (join(0), "node_rank is 0"),
    ],
)
def test_who_does_not_fit_is_refused_and_ends_the_start(table: NodeTable, message: Join, why: str) -> None:
    answer = table.take(b"a", message, 0.0)
    assert isinstance(answer, Refused)
    assert table.failure is not None and answer.why in table.failure
    assert re.search(why, answer.why)


def test_a_stranger_does_not_end_an_engine_that_runs(running: NodeTable) -> None:
    assert isinstance(running.take(b"z", join(1, {"page_size": 16}), 2.0), Refused)
    answer = running.take(b"z", join(1), 2.0)
    assert isinstance(answer, Refused) and "node 1 has joined, and lives" in answer.why
    assert running.failure is None and running.deaths == []


def test_silence_loses_all_ranks_of_a_node_and_of_no_other(running: NodeTable) -> None:
    running.take(b"b", Beat(), 5.0)
    running.look(10.9)
    assert running.deaths == []
    running.look(11.1)
    how = "node 1 gave no sign of life for 10 s"
    assert running.deaths == [("scheduler-2", how), ("scheduler-3", how)]
    assert running.live == [b"b"]
    running.look(12.0)
    assert len(running.deaths) == 2  # each dies once


def test_a_lost_node_is_told_so_and_does_not_come_back(running: NodeTable) -> None:
    running.look(11.1)
    answer = running.take(b"a", Beat(), 12.0)
    assert (
        isinstance(answer, Refused) and "gave the node up" in answer.why and "no sign of life" in answer.why
    )
    again = running.take(b"c", join(1), 13.0)
    assert isinstance(again, Refused) and "no sign of life" in again.why and "joins once" in again.why
    assert isinstance(running.take(b"a", join(1), 13.0), Refused)


def test_a_rank_that_died_dies_once_and_alone(running: NodeTable) -> None:
    running.take(b"a", ComponentDied(component="scheduler-3", how="signal SIGKILL"), 2.0)
    assert running.deaths == [("scheduler-3", "signal SIGKILL")]
    running.take(b"a", Leaving(why="it was stopped"), 3.0)
    assert running.deaths[1:] == [("scheduler-2", "node 1 ended: it was stopped")]


def test_a_rank_of_another_node_cannot_be_declared_dead(running: NodeTable) -> None:
    running.take(b"a", ComponentDied(component="scheduler-5", how="no"), 2.0)
    running.take(b"a", ComponentDied(component="detokenizer", how="no"), 2.0)
    assert running.deaths == []


def test_a_node_that_ends_while_it_starts_ends_the_start(table: NodeTable) -> None:
    table.take(b"a", join(1), 0.0)
    table.take(b"a", Leaving(why="the scheduler-2 could not start: no memory"), 1.0)
    assert table.failure == "node 1 ended: the scheduler-2 could not start: no memory"
    assert table.deaths == []


def test_a_node_that_falls_silent_while_it_starts_ends_the_start(table: NodeTable) -> None:
    table.take(b"a", join(1), 0.0)
    table.look(10.1)
    assert table.failure == "node 1 gave no sign of life for 10 s"
