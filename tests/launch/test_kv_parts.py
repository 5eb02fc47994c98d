"""What one side of a pair starts beside its schedulers: the bootstrap server, and who moves the KV; what it refuses."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from sgviz.config import Settings
from sgviz.disaggregation import FAKE_BOOTSTRAP_HOST, DecodeManager, PrefillManager
from sgviz.disaggregation.bootstrap_client import get_rank, get_server
from sgviz.engine import Engine
from sgviz.errors import ConfigError, StartupError
from sgviz.events import Tracer
from sgviz.launch.kv_parts import bootstrap_host, open_kv, start_bootstrap, without_other_side
from sgviz.messages import GenerateReqInput
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.protocol import Worker


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def settings(mode: str, **more: object) -> Settings:
    return Settings.build(
        **{"disaggregation_mode": mode, "device": "mock", "disaggregation_bootstrap_port": 0} | more
    )


def tracer() -> Tracer:
    return Tracer("scheduler", None)


def test_only_a_prefill_server_has_a_bootstrap_server() -> None:
    for mode in ("null", "decode"):
        same, end = start_bootstrap(given := settings(mode))
        assert same is given
        end()
    told, end = start_bootstrap(settings("prefill"))
    port = told.disaggregation.disaggregation_bootstrap_port
    assert port > 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    with pytest.raises(StartupError, match=str(port)):
        start_bootstrap(settings("prefill", disaggregation_bootstrap_port=port))
    end()
    start_bootstrap(told)[1]()  # the port is free again


def test_where_the_ranks_are_told() -> None:
    assert bootstrap_host(settings("prefill", host="localhost")) == "localhost"
    other = settings("prefill", host="0.0.0.0", disaggregation_bootstrap_host="127.0.0.1")
    assert bootstrap_host(other) == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_prefill_server_has_an_address_that_others_reach(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings("prefill", host=host)
    assert error.value.param == "disaggregation_bootstrap_host" and host in error.value.message
    for fine in (("decode", {"host": host}), ("null", {"host": host}),
                 ("prefill", {"host": host, "disaggregation_bootstrap_host": "127.0.0.1"})):  # fmt: skip
        settings(fine[0], **fine[1])
    with pytest.raises(ConfigError, match=host):
        settings("prefill", disaggregation_bootstrap_host=host)


def test_vectors_have_no_sides() -> None:
    for mode in ("prefill", "decode"):
        with pytest.raises(ConfigError, match="is_embedding") as error:
            settings(mode, is_embedding=True)
        assert error.value.param == "disaggregation_mode"


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_of_a_prefill_server_registers(context: zmq.Context[Any], size: int) -> None:
    told, end = start_bootstrap(settings("prefill", dp_size=size, page_size=16))
    at = ("127.0.0.1", told.disaggregation.disaggregation_bootstrap_port)
    worker = MockWorker(mock_info(), threaded=False)
    managers = [open_kv(told, worker, context, tracer(), rank) for rank in range(size)]
    try:
        assert all(isinstance(manager, PrefillManager) for manager in managers)
        assert (get_server(*at).dp_size, get_server(*at).page_size) == (size, 16)
        routes = [get_rank(*at, rank) for rank in range(size)]
        assert [route.dp_rank for route in routes] == list(range(size))
        assert len({route.rank_port for route in routes}) == size
    finally:
        for manager in managers:
            assert manager is not None
            manager.close()
        end()


def test_what_moves_the_kv(context: zmq.Context[Any]) -> None:
    worker = MockWorker(mock_info(), threaded=False)
    assert open_kv(settings("null"), worker, context, tracer(), 0) is None
    manager = open_kv(settings("decode"), worker, context, tracer(), 1)
    assert isinstance(manager, DecodeManager)
    manager.close()


def test_kv_that_cannot_travel_is_refused_by_name(context: zmq.Context[Any]) -> None:
    encoder = SimpleNamespace(info=SimpleNamespace(is_generation=False, model="tiny-bert"))
    still = SimpleNamespace(info=SimpleNamespace(is_generation=True, model="m"))
    for worker, words in ((encoder, "tiny-bert is an encoder"), (still, "KV of device mock cannot travel")):
        with pytest.raises(ConfigError, match=words) as error:
            open_kv(settings("decode"), cast(Worker, worker), context, tracer(), 0)
        assert error.value.param == "disaggregation_mode"


def test_a_request_for_one_side_alone() -> None:
    request = without_other_side(GenerateReqInput(text="a"), 3)
    assert (request.bootstrap_host, request.bootstrap_room) == (FAKE_BOOTSTRAP_HOST, 3)


def test_an_engine_tells_the_port_that_it_took() -> None:
    with Engine(
        "tiny-llama", device="mock", disaggregation_mode="prefill", disaggregation_bootstrap_port=0
    ) as engine:
        own = engine.settings.disaggregation
        assert get_server("127.0.0.1", own.disaggregation_bootstrap_port).dp_size == 1
    with Engine("tiny-llama", device="mock", disaggregation_mode="prefill",
                disaggregation_bootstrap_port=own.disaggregation_bootstrap_port) as engine:  # fmt: skip
        assert engine.settings.disaggregation == own  # nothing of the first is left
