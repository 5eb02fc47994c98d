"""uvicorn inside a loop that is already running: start on a port, stop with a grace time.

Mirrors the end of SGLang's `launch_server`. Signals are the launcher's business, not the server's.
Imports: errors.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from sgviz.errors import StartupError

BACKLOG = 2048
LAST_WORDS_S = 2.0  # for cancelled answers to say that the server stops


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What to make a server's loop with: uvloop where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class ServerHandle:
    """A running server. Make one with `await ServerHandle.start(...)`."""

    def __init__(self, server: _Server, task: asyncio.Task[None], host: str, port: int) -> None:
        self._server = server
        self._task = task
        self.host = host
        self.port = port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @classmethod
    async def start(cls, app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> ServerHandle:
        """Listen and return once requests are taken. Port 0 takes a free one; see `.port`.

        Raises:
            StartupError: the address cannot be used, or the app did not start. Nothing is left behind.
        """
        listener = _listen(host, port)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            loop="none",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=60,
            server_header=False,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="sgviz-http")
        up = asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait((task, up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if not server.up.is_set():
            listener.close()
            task.result()
        return cls(server, task, host, listener.getsockname()[1])

    async def stop(self, grace: float = 30.0) -> None:
        """Take no more connections, give running answers `grace` seconds, then cut them; idempotent."""
        self._server.config.timeout_graceful_shutdown = max(grace, 0.01)  # type: ignore[assignment]
        self._server.should_exit = True
        await asyncio.wait((self._task,))
        state = self._server.server_state
        if state.tasks:
            await asyncio.wait(tuple(state.tasks), timeout=LAST_WORDS_S)
        for connection in tuple(state.connections):
            if connection.transport is not None:
                connection.transport.close()
        self._task.result()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way to say it; in a loop that is not its own it would end the program
            raise StartupError("the app failed while starting (the log says why)") from None
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port shows at once and port 0 is known."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"host {host!r} is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener


def check_address(host: str, port: int) -> None:
    """Raise StartupError if the address cannot be listened on, before a model is loaded for nothing."""
    _listen(host, port).close()
