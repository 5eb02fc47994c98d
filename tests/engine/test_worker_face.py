"""The port that tokenizer workers share: what stays when it cannot be opened, and the connections behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from sgviz.config import HttpConfig, Settings
from sgviz.engine import worker_face
from sgviz.engine.http_face import Server
from sgviz.engine.worker_face import WorkerFace
from sgviz.errors import ConfigError, StartupError
from sgviz.serving.listeners import open_port, share_port
from sgviz.serving.pass_on import IDLE_S
from sgviz.serving.server import ServerHandle


class Crew:
    """Workers that are as good as there."""

    async def leave(self, patience: float) -> None:
        pass


def pipeline(path: Path, start: Callable[..., Any], **http: Any) -> Any:
    settings = Settings(http=HttpConfig(**http))
    return SimpleNamespace(
        settings=settings, ports=SimpleNamespace(main_path=str(path)), start_workers=start, router=object()
    )


async def start_none(listeners: list[socket.socket], path: str) -> Crew:
    return Crew()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets that were opened to be shared."""
    opened: list[socket.socket] = []

    def share(host: str, port: int, count: int) -> list[socket.socket]:
        opened.extend(share_port(host, port, 2))
        return list(opened)

    monkeypatch.setattr(worker_face, "share_port", share)
    return opened


def test_a_face_that_cannot_open_leaves_no_port_behind(tmp_path: Path, shared: list[socket.socket]) -> None:
    @asynccontextmanager
    async def failing(app: FastAPI) -> AsyncIterator[None]:
        Path(tmp_path, "nowhere").read_bytes()  # it cannot start
        yield

    async def refuse(listeners: list[socket.socket], path: str) -> Crew:
        raise StartupError("no worker today")

    (tmp_path / "taken").touch()
    cases = (
        (FastAPI(), pipeline(tmp_path / "taken", start_none), "cannot listen on the path"),
        (FastAPI(lifespan=failing), pipeline(tmp_path / "a", start_none), "the app failed"),
        (FastAPI(), pipeline(tmp_path / "b", refuse), "no worker today"),
    )
    for app, made, why in cases:
        shared.clear()
        with pytest.raises(StartupError, match=why):
            asyncio.run(WorkerFace.start(made, app, "127.0.0.1", 0))
        assert len(shared) == 2 and all(each.fileno() == -1 for each in shared)


@pytest.mark.parametrize("keep_alive", [0.5, 5.0, 10_000.0])
def test_an_idle_connection_behind_is_closed_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_alive: float
) -> None:
    given: list[HttpConfig] = []
    real = ServerHandle.start

    async def start(app: FastAPI, *, http: HttpConfig, listener: socket.socket) -> ServerHandle:
        given.append(http)
        return await real(app, http=http, listener=listener)

    monkeypatch.setattr(ServerHandle, "start", start)

    async def test() -> None:
        made = pipeline(tmp_path / "main", start_none, timeout_keep_alive=keep_alive)
        face = await WorkerFace.start(made, FastAPI(), "127.0.0.1", 0)
        open_port("127.0.0.1", face.port).close()  # only the workers have the port
        await face.stop()

    asyncio.run(test())
    assert given[0].timeout_keep_alive >= max(keep_alive, 10 * IDLE_S)


def test_a_port_of_workers_closes_with_its_engine_only(tmp_path: Path) -> None:
    async def test() -> None:
        made = pipeline(tmp_path / "main", start_none)
        face = await WorkerFace.start(made, FastAPI(), "127.0.0.1", 0)
        with pytest.raises(ConfigError, match="end with their engine only"):
            Server(made, face).stop()
        await face.stop()

    asyncio.run(test())
