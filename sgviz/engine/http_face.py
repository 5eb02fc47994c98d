"""An engine's HTTP face: the app, its servers, and the app used without a socket.

Imports: launch, serving, model (facts only).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import httpx2
from fastapi import FastAPI

from sgviz.config import Settings
from sgviz.debugger import debug_mount
from sgviz.engine.worker_face import AllLogs, WorkerFace, count_of_workers
from sgviz.errors import ConfigError, from_status
from sgviz.launch.http_parts import keys_of, serving_context
from sgviz.launch.pipeline import Pipeline
from sgviz.observe import ViewDesk, live_mount, observe_mount
from sgviz.recording import Recording
from sgviz.serving.app import create_app
from sgviz.serving.context import Keys, ServingContext
from sgviz.serving.server import ServerHandle

IN_PROCESS_URL = "http://engine"
SERVER_STOP_S = 1.0  # after the requests have drained, for the last bytes
Message = dict[str, Any]


class Server:
    """A served engine. `url` takes OpenAI clients (their base_url is `url + "/v1"`)."""

    def __init__(self, pipeline: Pipeline, handle: ServerHandle | WorkerFace) -> None:
        self._pipeline, self._handle = pipeline, handle
        self.engine: object = None

    @property
    def url(self) -> str:
        return self._handle.url

    @property
    def port(self) -> int:
        return self._handle.port

    def stop(self, grace: float = 5.0) -> None:
        """Close the port; the engine goes on.

        Raises:
            ConfigError: tokenizer workers serve it. They are parts of the engine, which cannot go on without them.
        """
        if self._pipeline.router is not None:
            raise ConfigError(
                f"the port {self.port} is served by tokenizer workers, which end with their engine only: shut that "
                "down, or serve with tokenizer_worker_num = 1",
                param="tokenizer_worker_num",
            )
        self._pipeline.loop.call(self._handle.stop(grace))

    def __repr__(self) -> str:
        return f"<sgviz server at {self.url}>"


class HttpFace:
    """Makes apps for one pipeline and keeps what must be closed with it. All in the engine's loop."""

    def __init__(self, pipeline: Pipeline, recording: Callable[[], Recording]) -> None:
        self._pipeline = pipeline
        self._recording = recording
        self._settings: Settings = pipeline.settings
        self._servers: list[ServerHandle | WorkerFace] = []
        self._app: FastAPI | None = None
        self._lifespan: Any = None

    async def serve(self, host: str | None, port: int | None) -> Server:
        """Open a port. StartupError if it is taken."""
        serve = self._settings.serve
        app = create_app(self._context())
        host, port = host or serve.host, serve.port if port is None else port
        handle: ServerHandle | WorkerFace
        if self._pipeline.router is None:
            handle = await ServerHandle.start(app, host, port, self._settings.http)
        elif self._servers:
            raise ConfigError("tokenizer workers serve one port, and that is open already", param="port")
        else:
            handle = await WorkerFace.start(self._pipeline, app, host, port)
        self._servers.append(handle)
        return Server(self._pipeline, handle)

    async def post(self, path: str, body: Message) -> dict[str, Any]:
        """A request through the very app that serves HTTP, without the socket. Raises the error it answers with."""
        app = await self._in_process_app()
        key = self._settings.serve.api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url=IN_PROCESS_URL, timeout=None) as client:
            response = await client.post(path, json=body, headers=headers)
        answer: dict[str, Any] = response.json()
        if response.status_code != 200:
            error = answer["error"]
            raise from_status(response.status_code, error["message"], param=error["param"])
        return answer

    async def close(self) -> None:
        """Close the ports, and the app used without one."""
        for handle in self._servers:
            await handle.stop(SERVER_STOP_S)
        self._servers.clear()
        if self._lifespan is not None:
            await self._lifespan.__aexit__(None, None, None)
            self._lifespan = None

    async def _in_process_app(self) -> FastAPI:
        if self._app is None:
            self._app = create_app(self._context())
            self._lifespan = self._app.router.lifespan_context(self._app)
            await self._lifespan.__aenter__()
        return self._app

    def _context(self) -> ServingContext:
        pipeline = self._pipeline
        return serving_context(
            self._settings,
            pipeline.scheduler_info,
            pipeline.model_dir,
            manager=pipeline.manager,
            tokenizer=pipeline.tokenizer,
            templates=pipeline.templates,
            trace=pipeline.http_trace,
            status=pipeline.status,
            request_log=pipeline.request_log if pipeline.router is None else AllLogs(pipeline),
            mounts=[
                *self._observe(keys_of(self._settings)),
                *([debug_mount(pipeline.manager)] if self._settings.serve.enable_debugger else []),
            ],
        )

    def _observe(self, keys: Keys) -> list[Callable[[FastAPI], None]]:
        pipeline, name = self._pipeline, self._settings.served_model_name
        desk = ViewDesk(pipeline.ring, self._recording, pipeline.tokenizer)
        page = live_mount(desk, keys, f"sgviz: {name}", debuggable=self._settings.serve.enable_debugger)
        allowed = self._settings.observe.allowed_labels
        counted = functools.partial(count_of_workers, pipeline.router)
        return [observe_mount(pipeline.ring, self._recording, name, desk, allowed, counted), page]
