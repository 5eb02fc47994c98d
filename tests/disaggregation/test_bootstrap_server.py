"""The bootstrap server by real HTTP: routes, status codes, and what it forgets."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator

import msgspec
import pytest

from sgviz.disaggregation import bootstrap_client
from sgviz.disaggregation.bootstrap_client import (
    TELLS,
    call,
    get_rank,
    get_server,
    put_rank,
    query_dp_rank,
    register_dp_rank,
)
from sgviz.disaggregation.bootstrap_server import BootstrapServer
from sgviz.disaggregation.lookups import NoSuchRank, NotYet, find
from sgviz.disaggregation.wire import RankRoute
from sgviz.errors import SgvizError, StartupError
from sgviz.events.clock import VirtualClock

ALL = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


def route(rank: int, size: int = 2, **more: object) -> RankRoute:
    base = {"rank_ip": "127.0.0.1", "rank_port": 5000 + rank, "heart_port": 6000 + rank, "page_size": 16}
    fields = {"dp_rank": rank, "dp_size": size, "tag": "mock", "wire_bytes": 8} | base | more
    return msgspec.convert(fields, RankRoute)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def server(clock: VirtualClock) -> Iterator[BootstrapServer]:
    made = BootstrapServer(clock=clock)
    yield made
    made.close()


def ask(server: BootstrapServer, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    connection.request(method, path, body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_503_until_all_ranks_are_in(server: BootstrapServer) -> None:
    at = (server.host, server.port)
    assert ask(server, "GET", "/health") == (200, b"OK")
    assert ask(server, "GET", ALL)[0] == 503
    put_rank(*at, route(0))
    assert ask(server, "GET", ALL)[0] == 503
    put_rank(*at, route(1))
    shared = get_server(*at)
    assert (shared.dp_size, shared.page_size, shared.kv_cache_dtype) == (2, 16, "mock")
    assert get_rank(*at, 1) == route(1)
    put_rank(*at, route(1, rank_port=7000))  # it came back
    assert get_rank(*at, 1).rank_port == 7000


def test_bad_bodies_and_ranks(server: BootstrapServer) -> None:
    at = (server.host, server.port)
    assert ask(server, "PUT", "/route", b"{}")[0] == 400
    assert ask(server, "GET", "/route")[0] == 400
    assert ask(server, "POST", "/query_dp_ranks", b"[")[0] == 400
    with pytest.raises(SgvizError, match="400"):
        put_rank(*at, route(3))
    put_rank(*at, route(0))
    with pytest.raises(SgvizError, match="not of the same server"):
        put_rank(*at, route(1, tag="other"))
    put_rank(*at, route(1))
    with pytest.raises(SgvizError, match="404"):
        get_rank(*at, 2)


def test_rooms_are_told_and_forgotten(server: BootstrapServer, clock: VirtualClock) -> None:
    at = (server.host, server.port)
    register_dp_rank(*at, 77, 1)
    assert query_dp_rank(*at, 77) == 1 and query_dp_rank(*at, 78) is None
    clock.advance(241 * 10**9)
    assert query_dp_rank(*at, 77) is None


def test_which_rank_has_a_room(server: BootstrapServer) -> None:
    at = (server.host, server.port)
    for rank in (0, 1):
        put_rank(*at, route(rank))
    assert find(*at, 7, None).dp_rank == 1 and find(*at, 7, 0).dp_rank == 0
    with pytest.raises(NoSuchRank, match="not one of the 2"):
        find(*at, 7, 5)
    for rank in (0, 1):
        put_rank(*at, route(rank, follow_bootstrap_room=False))
    with pytest.raises(NotYet):
        find(*at, 7, None)
    register_dp_rank(*at, 7, 0)
    assert find(*at, 7, None).dp_rank == 0


def test_a_taken_port_is_a_startup_error(server: BootstrapServer) -> None:
    taken = f"{server.port}: Address already in use; choose another disaggregation_bootstrap_port"
    with pytest.raises(StartupError, match=taken):
        BootstrapServer(server.host, server.port)


def test_a_room_that_was_not_heard_is_told_again(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def deaf(host: str, port: int, method: str, path: str, body: bytes | None = None) -> bytes:
        asked.append(path)
        if len(asked) < TELLS:
            raise SgvizError("it does not answer")
        return call(host, port, method, path, body)

    monkeypatch.setattr(bootstrap_client, "call", deaf)
    register_dp_rank(server.host, server.port, 7, 1)
    assert asked == ["/register_dp_rank"] * TELLS
    assert query_dp_rank(server.host, server.port, 7) == 1
    asked.clear()
    monkeypatch.setattr(bootstrap_client, "TELLS", 2)
    with pytest.raises(SgvizError, match="does not answer"):
        register_dp_rank(server.host, server.port, 8, 1)


@pytest.mark.parametrize("host", ["a..b", "no host", "x" * 300])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(SgvizError, match=f"bootstrap server {re.escape(host)}:80 does not answer"):
        get_server(host, 80)


def test_another_server_is_no_bootstrap_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_client, "call", lambda *_: b"<html>welcome</html>")
    for asked in (
        lambda: get_server("h", 80),
        lambda: get_rank("h", 80, 0),
        lambda: query_dp_rank("h", 80, 5),
    ):
        with pytest.raises(
            SgvizError, match=r"h:80 is no bootstrap server: it answers /\w+ with '<html>welcome"
        ):
            asked()
