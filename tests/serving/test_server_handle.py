"""ServerHandle: ports, refusals at the start, and stops with and without grace."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from serving_tools import ScriptedManager, chat, served, until
from test_chat_endpoint import events

from sgviz.errors import StartupError
from sgviz.serving import ServerHandle, ServerState
from sgviz.serving.server import check_address


def test_a_taken_port_is_refused_at_once() -> None:
    with served() as server:
        with pytest.raises(StartupError, match=str(server.handle.port)):
            server.call(ServerHandle.start(FastAPI(), port=server.handle.port))
        with pytest.raises(StartupError, match=str(server.handle.port)):
            check_address("127.0.0.1", server.handle.port)
    check_address("127.0.0.1", server.handle.port)


def test_a_foreign_host_is_refused() -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
        asyncio.run(ServerHandle.start(FastAPI(), host="192.0.2.1"))
    with pytest.raises(StartupError, match=r"no\.such\.host\.invalid"):
        asyncio.run(ServerHandle.start(FastAPI(), host="no.such.host.invalid"))


def test_an_app_that_fails_at_its_start_leaves_nothing() -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.missing.open()
        yield

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StartupError):
        asyncio.run(ServerHandle.start(FastAPI(lifespan=lifespan), port=port))
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_two_servers_in_one_loop_and_signals_stay_as_they_are() -> None:
    async def both() -> None:
        before = signal.getsignal(signal.SIGTERM)
        one, two = await ServerHandle.start(FastAPI()), await ServerHandle.start(FastAPI())
        assert one.port != two.port and signal.getsignal(signal.SIGTERM) is before
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{one.url}/openapi.json")).status_code == 200
            await one.stop(1)
            await one.stop(1)
            assert (await client.get(f"{two.url}/openapi.json")).status_code == 200
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{one.url}/openapi.json")
        await two.stop(1)
        again = await ServerHandle.start(FastAPI(), port=one.port)
        await again.stop(1)

    asyncio.run(both())


def run_during_stop(grace: float, opens: bool, **fields: Any) -> tuple[httpx.Response, ScriptedManager]:
    """The answer of a request that was running when the server was told to stop."""
    gate = threading.Event()
    manager = ScriptedManager(gate=gate)
    with served(manager=manager) as server:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(server.http.post("/v1/chat/completions", json=chat(**fields)))
        )
        thread.start()
        assert until(lambda: bool(manager.live))
        server.status.state = ServerState.STOPPING
        stop = asyncio.run_coroutine_threadsafe(server.handle.stop(grace), server.loop)
        if opens:
            gate.set()
        stop.result(20)
        thread.join(5)
    return answers[0], manager


@pytest.mark.parametrize("streamed", [False, True])
def test_running_requests_finish_within_the_grace_time(streamed: bool) -> None:
    answer, manager = run_during_stop(10, True, stream=streamed)
    assert answer.status_code == 200 and "epsilon" in answer.text and not manager.closed_early


def test_a_stream_that_outlives_the_grace_time_ends_with_an_error() -> None:
    answer, manager = run_during_stop(0.1, False, stream=True)
    assert events(answer)[-1]["error"]["code"] == 503
    assert manager.closed_early and [code for _, code in manager.sent] == [503]


def test_an_answer_that_outlives_the_grace_time_is_503() -> None:
    answer, manager = run_during_stop(0.1, False)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == 503
    assert manager.closed_early and [code for _, code in manager.sent] == [503]
