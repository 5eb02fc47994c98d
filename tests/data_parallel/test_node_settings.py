"""Settings of several hosts: what is allowed, where they meet, what they must agree in."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from sgviz.config import Settings
from sgviz.config.nodes import meeting_point
from sgviz.data_parallel.nodes import addresses_of, agreement, disagreement
from sgviz.engine import Engine
from sgviz.errors import ConfigError, StartupError
from sgviz.launch.ranks import children_of, local_schedulers_of, schedulers_of, share_of

TWO: dict[str, Any] = {"nnodes": 2, "dp_size": 4, "dist_init_addr": "127.0.0.1:25000"}


def test_each_node_runs_its_share_of_the_ranks() -> None:
    nodes = [Settings.build(**TWO, node_rank=node) for node in range(2)]
    assert [local_schedulers_of(settings) for settings in nodes] == [
        ["scheduler-0", "scheduler-1"],
        ["scheduler-2", "scheduler-3"],
    ]
    assert [name for settings in nodes for name in local_schedulers_of(settings)] == schedulers_of(nodes[0])
    assert children_of(nodes[0]) == [
        "data_parallel_controller",
        "scheduler-0",
        "scheduler-1",
        "detokenizer",
    ]


def test_one_node_is_as_it_was() -> None:
    settings = Settings.build(dp_size=2)
    assert addresses_of(settings.parallel) is None
    assert local_schedulers_of(settings) == schedulers_of(settings)


def test_the_threads_of_a_host_are_shared_out_among_its_own_ranks() -> None:
    shares = [
        share_of(settings, "processes") for settings in (Settings.build(dp_size=2), Settings.build(**TWO))
    ]
    assert shares[0].model.torch_threads == shares[1].model.torch_threads is not None


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"nnodes": 2}, "dp_size", "multiple of 2"),
        ({**TWO, "dp_size": 3}, "dp_size", "dp_size = 3"),
        ({"nnodes": 2, "dp_size": 2}, "dist_init_addr", "host:port of node 0"),
        ({**TWO, "node_rank": 2}, "node_rank", "less than nnodes, which is 2"),
        ({"node_rank": 1}, "node_rank", "less than nnodes, which is 1"),
        ({**TWO, "nnodes": 0}, "nnodes", ">= 1"),
        ({**TWO, "node_timeout": 0.0}, "node_timeout", "> 0"),
        ({**TWO, "node_heartbeat_timeout": 0.1}, "node_heartbeat_timeout", "0.5"),
        ({**TWO, "disaggregation_mode": "decode"}, "nnodes", "sgviz router"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Settings.build(**given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("address", "point"),
    [("10.0.0.1:5000", ("10.0.0.1", 5000)), ("[::1]:5000", ("::1", 5000)), ("node-0:1", ("node-0", 1))],
)
def test_the_meeting_point(address: str, point: tuple[str, int]) -> None:
    assert meeting_point(Settings.build(**{**TWO, "dist_init_addr": address}).parallel) == point


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":5000", "::1:5000", "[]:5000", "host:0", "host:x", "host:65530", "host:٣"],
)
def test_no_meeting_point(address: str) -> None:
    with pytest.raises(ConfigError, match="dist_init_addr") as caught:
        Settings.build(**{**TWO, "dist_init_addr": address})
    assert caught.value.param == "dist_init_addr"


def test_the_ports_follow_the_first_and_differ() -> None:
    found = addresses_of(Settings.build(**TWO).parallel)
    assert found is not None
    shared = [found.tokenizer, found.detokenizer, found.events, found.loads]
    assert list(found.ranks) == [2, 3]
    assert [*shared, *found.ranks.values()] == [f"tcp://127.0.0.1:{25000 + n}" for n in range(1, 7)]


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 25003))
        other.listen(1)
        with pytest.raises(StartupError, match=r"127\.0\.0\.1:25003.*25000 to 25006"):
            addresses_of(Settings.build(**TWO).parallel)


def test_an_address_of_another_machine_cannot_be_opened() -> None:
    with pytest.raises(StartupError, match=r"203\.0\.113\.1"):
        addresses_of(Settings.build(**{**TWO, "dist_init_addr": "203.0.113.1:25000"}).parallel)


def test_an_engine_says_how_such_nodes_are_started() -> None:
    with pytest.raises(ConfigError, match="sgviz serve"):
        Engine("tiny-llama", device="mock", mode="processes", **TWO, node_rank=1)
    with pytest.raises(ConfigError, match="processes"):
        Engine("tiny-llama", device="mock", **TWO)


def test_places_and_sizes_of_a_host_may_differ_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    here = agreement(Settings.build(**TWO), tmp_path)
    own = {
        "node_rank": 1,
        "torch_threads": 3,
        "max_total_tokens": 4096,
        "node_timeout": 7.0,
        "base_gpu_id": 1,
    }
    assert disagreement(here, agreement(Settings.build(**TWO, **own), tmp_path)) == ""
    for name, value in {"page_size": 16, "random_seed": 5, "load_balance_method": "total_tokens"}.items():
        there = agreement(Settings.build(**TWO, **{name: value}), tmp_path)
        assert disagreement(here, there) == f"{name} {value} (node 0 has {here[name]})"
    (tmp_path / "config.json").write_text("{ }")
    assert "another model" in disagreement(here, agreement(Settings.build(**TWO), tmp_path))
