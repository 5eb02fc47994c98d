"""uvicorn inside a loop that is already running: start on a port, stop with a grace time.

Mirrors the end of SGLang's `launch_server`. Signals are the launcher's business, not the server's.
Imports: config, errors.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from sgviz.config import HttpConfig
from sgviz.errors import ConfigError, StartupError
from sgviz.serving.http_protocol import GuardedConfig, GuardedProtocol
from sgviz.serving.listeners import BACKLOG, open_port

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

    def __init__(self, app: FastAPI, server: _Server, task: asyncio.Task[None], host: str, port: int) -> None:
        self._app = app
        self._server = server
        self._task = task
        self._scheme = "https" if server.config.is_ssl else "http"
        self.host = host
        self.port = port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self._scheme}://{host}:{self.port}"

    @classmethod
    async def start(
        cls,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 0,
        http: HttpConfig | None = None,
        listener: socket.socket | None = None,
    ) -> ServerHandle:
        """Listen and return once requests are taken. Port 0 takes a free one; see `.port`.

        `listener`: a bound socket in place of a new one.

        Raises:
            ConfigError: key and certificate cannot be used.
            StartupError: the address cannot be used, or the app did not start. Nothing is left behind.
        """
        http = http or HttpConfig()
        check_tls(http)
        listener = listener or open_port(host, port)
        server = _Server(_config(app, http))
        task = asyncio.create_task(server.serve(sockets=[listener]), name="sgviz-http")
        up = asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait((task, up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if not server.up.is_set():
            listener.close()
            task.result()
        at = listener.getsockname()
        return cls(app, server, task, host, at[1] if isinstance(at, tuple) else 0)

    async def stop(self, grace: float = 30.0) -> None:
        """Take no more connections, give running answers `grace` seconds, then cut them; idempotent.

        `app.state.ending` tells answers that have no end of their own.
        """
        self._app.state.ending = True
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


def _config(app: FastAPI, http: HttpConfig) -> GuardedConfig:
    return GuardedConfig(
        app,
        read_timeout=http.read_timeout,
        ws="none",
        lifespan="on",
        loop="none",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=http.timeout_keep_alive,
        server_header=False,
        ssl_keyfile=http.ssl_keyfile,
        ssl_certfile=http.ssl_certfile,
        ssl_keyfile_password=http.ssl_keyfile_password,
        ssl_ca_certs=http.ssl_ca_certs,
        # certificates to vouch for clients would mean nothing if clients need not be vouched for
        ssl_cert_reqs=ssl.CERT_REQUIRED if http.ssl_ca_certs else ssl.CERT_NONE,
    )


class _Server(uvicorn.Server):
    def __init__(self, config: GuardedConfig) -> None:
        super().__init__(config)
        self._guarded = config
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup([])  # the app, and no socket yet: uvicorn has no setting for the handshake
        except SystemExit:  # uvicorn's way to say it; in a loop that is not its own it would end the program
            raise StartupError("the app failed while starting (the log says why)") from None
        for listener in sockets or ():
            self.servers.append(await self._listen(listener))
        self.up.set()

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        """Serve on `listener` as uvicorn does; a client has read_timeout seconds for the handshake of TLS too."""
        config = self._guarded
        return await asyncio.get_running_loop().create_server(
            self._protocol,
            sock=listener,
            ssl=config.ssl,
            backlog=config.backlog,
            ssl_handshake_timeout=config.read_timeout if config.is_ssl else None,
        )

    def _protocol(self) -> asyncio.Protocol:
        state = self.lifespan.state
        return GuardedProtocol(self._guarded, server_state=self.server_state, app_state=state)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def check_address(host: str, port: int) -> None:
    """Raise StartupError if the address cannot be listened on, before a model is loaded for nothing."""
    open_port(host, port).close()


def check_tls(http: HttpConfig) -> None:
    """Raise ConfigError if key, certificate and password do not go together, before a model is loaded for nothing."""
    if http.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # with a password, even an empty one, OpenSSL does not ask for it at the terminal
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, http.ssl_keyfile_password or "")
        if http.ssl_ca_certs is not None:
            context.load_verify_locations(http.ssl_ca_certs)
    except (OSError, ValueError) as error:
        if _password_is_wrong(http, error):
            problem = "is locked; ssl_keyfile_password must open it, and none is given"
            if http.ssl_keyfile_password:
                problem = "is locked, and ssl_keyfile_password does not open it"
            raise ConfigError(f"key {http.ssl_keyfile!r} {problem}", param="ssl_keyfile_password") from None
        raise ConfigError(
            f"key {http.ssl_keyfile!r} and certificate {http.ssl_certfile!r} cannot be used: {error}; both are "
            "PEM files that belong together, and a locked key needs ssl_keyfile_password",
            param="ssl_certfile",
        ) from None


def _password_is_wrong(http: HttpConfig, error: Exception) -> bool:
    """Whether the key is locked and stayed so. What is wrong otherwise is found in a key that was opened."""
    if not isinstance(error, ssl.SSLError) or error.reason == "KEY_VALUES_MISMATCH":
        return False
    path = http.ssl_keyfile or http.ssl_certfile
    return path is not None and b"ENCRYPTED" in Path(path).read_bytes()
