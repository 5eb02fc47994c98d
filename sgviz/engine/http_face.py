"""An engine's HTTP face: the app, its servers, and the app used without a socket.

Imports: launch, serving, model (facts only).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
from fastapi import FastAPI

from sgviz import __version__
from sgviz.config import Settings
from sgviz.debugger import debug_mount
from sgviz.errors import from_status
from sgviz.launch.pipeline import Pipeline
from sgviz.model.model_config import read_json
from sgviz.observe import ViewDesk, live_mount, observe_mount
from sgviz.recording import Recording
from sgviz.serving.app import create_app
from sgviz.serving.context import Keys, ModelFacts, ServingContext
from sgviz.serving.custom_labels import CustomLabels
from sgviz.serving.server import ServerHandle

IN_PROCESS_URL = "http://engine"
SERVER_STOP_S = 1.0  # after the requests have drained, for the last bytes
DEFAULT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Message = dict[str, Any]


class Server:
    """A served engine. `url` takes OpenAI clients (their base_url is `url + "/v1"`)."""

    def __init__(self, pipeline: Pipeline, handle: ServerHandle) -> None:
        self._pipeline, self._handle = pipeline, handle
        self.engine: object = None

    @property
    def url(self) -> str:
        return self._handle.url

    @property
    def port(self) -> int:
        return self._handle.port

    def stop(self, grace: float = 5.0) -> None:
        """Close the port; the engine goes on."""
        self._pipeline.loop.call(self._handle.stop(grace))

    def __repr__(self) -> str:
        return f"<sgviz server at {self.url}>"


class HttpFace:
    """Makes apps for one pipeline and keeps what must be closed with it. All in the engine's loop."""

    def __init__(self, pipeline: Pipeline, recording: Callable[[], Recording]) -> None:
        self._pipeline = pipeline
        self._recording = recording
        self._settings: Settings = pipeline.settings
        self._servers: list[ServerHandle] = []
        self._app: FastAPI | None = None
        self._lifespan: Any = None

    async def serve(self, host: str | None, port: int | None) -> Server:
        """Open a port. StartupError if it is taken."""
        serve = self._settings.serve
        app = create_app(self._context())
        port = serve.port if port is None else port
        handle = await ServerHandle.start(app, host or serve.host, port, self._settings.http)
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
        pipeline, serve, observe = self._pipeline, self._settings.serve, self._settings.observe
        keys = Keys(api_key=serve.api_key, admin_api_key=serve.admin_api_key)
        return ServingContext(
            tokenizer_manager=pipeline.manager,
            tokenizer=pipeline.tokenizer,
            templates=pipeline.templates,
            facts=self._facts(),
            trace=pipeline.http_trace,
            status=pipeline.status,
            settings=self._settings.public(),
            keys=keys,
            enable_cache_report=serve.enable_cache_report,
            default_include_usage=serve.stream_response_default_include_usage,
            tool_call_parser=serve.tool_call_parser,
            reasoning_parser=serve.reasoning_parser,
            health_timeout=self._settings.http.health_timeout,
            http=self._settings.http,
            request_log=pipeline.request_log,
            custom_labels=CustomLabels(
                header=observe.tokenizer_metrics_custom_labels_header, allowed=observe.allowed_labels
            ),
            mounts=[
                *self._observe(keys),
                *([debug_mount(pipeline.manager)] if serve.enable_debugger else []),
            ],
        )

    def _observe(self, keys: Keys) -> list[Callable[[FastAPI], None]]:
        pipeline, name = self._pipeline, self._settings.served_model_name
        desk = ViewDesk(pipeline.ring, self._recording, pipeline.tokenizer)
        page = live_mount(desk, keys, f"sgviz: {name}", debuggable=self._settings.serve.enable_debugger)
        allowed = self._settings.observe.allowed_labels
        return [observe_mount(pipeline.ring, self._recording, name, desk, allowed), page]

    def _facts(self) -> ModelFacts:
        info, model = self._pipeline.infos["scheduler"], self._settings.model
        return ModelFacts(
            served_model_name=self._settings.served_model_name,
            model_path=model.model_path,
            tokenizer_path=model.tokenizer_path or model.model_path,
            context_len=info.context_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            version=__version__,
            default_sampling=_default_sampling(self._pipeline),
            is_generation=info.is_generation,
            embedding=info.embedding,
        )


def _default_sampling(pipeline: Pipeline) -> dict[str, float]:
    """Sampling defaults of the model's generation_config.json, where it has one."""
    path = pipeline.model_dir / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    return {name: config[name] for name in DEFAULT_SAMPLING if isinstance(config.get(name), (int, float))}  # type: ignore[misc]
