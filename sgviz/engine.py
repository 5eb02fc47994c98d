"""Engine: the Python face of the pipeline. Mirrors SGLang's Engine, with chat, a server and a live recording.

Works in a script and in a notebook: the engine's own event loop runs in a thread, so blocking, async and
streaming calls need no patched loop. Every call takes the way an HTTP request takes. Imports: everything.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx2
import msgspec
from fastapi import FastAPI

from sgviz import __version__
from sgviz.config import Settings
from sgviz.errors import BadRequest, ConfigError, SgvizError, from_status
from sgviz.launch.pipeline import Pipeline
from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.model.model_config import read_json
from sgviz.recording import ClockAnchor, Header, Recording
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.serving.app import create_app
from sgviz.serving.context import Keys, ModelFacts, ServingContext
from sgviz.serving.sampling import native_sampling
from sgviz.serving.server import ServerHandle

T = TypeVar("T")
Mode = Literal["threads", "processes"]
Message = dict[str, Any]
Output = dict[str, Any]
IN_PROCESS_URL = "http://engine"
SERVER_STOP_S = 1.0  # after the requests have drained, for the last bytes
DEFAULT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_END = object()


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Engine.chat`; prints as its text. `raw` is the whole OpenAI object, `rid` its id."""

    text: str
    rid: str
    finish_reason: str
    usage: dict[str, Any]
    raw: dict[str, Any]

    def __str__(self) -> str:
        return self.text


class Server:
    """A served engine. `url` takes OpenAI clients (their base_url is `url + "/v1"`)."""

    def __init__(self, engine: Engine, handle: ServerHandle) -> None:
        self._engine, self._handle = engine, handle

    @property
    def url(self) -> str:
        return self._handle.url

    @property
    def port(self) -> int:
        return self._handle.port

    def stop(self, grace: float = 5.0) -> None:
        """Close the port; the engine goes on."""
        self._engine.pipeline.loop.call(self._handle.stop(grace))

    def __repr__(self) -> str:
        return f"<sgviz server at {self.url}>"


class Engine:
    """A running pipeline.

    Args:
        model: same as `model_path`: the default model's name, a tiny model's, a folder or a hub id.
        mode: components as threads of this process (default) or as processes.
        event_loop: normal or overlap; same as `disable_overlap_schedule`.
        schedule_policy: a policy's name, or (threads only) an object with `name` and `order`.
        settings: any other setting of `sgviz.config` by its name.

    Raises:
        ConfigError: a setting is unknown or not allowed. StartupError: nothing was left behind.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        mode: Mode = "threads",
        event_loop: Literal["normal", "overlap"] | None = None,
        schedule_policy: str | SchedulePolicy | None = None,
        **settings: object,
    ) -> None:
        policy = None if isinstance(schedule_policy, str) else schedule_policy
        if model is not None:
            settings.setdefault("model_path", model)
        if event_loop is not None:
            settings["disable_overlap_schedule"] = _is_normal(event_loop)
        if isinstance(schedule_policy, str):
            settings["schedule_policy"] = schedule_policy
        self._start(Settings.build(**settings), mode, policy)

    @classmethod
    def from_settings(cls, settings: Settings, *, mode: Mode = "threads") -> Engine:
        """An engine from a whole Settings object, as the command line makes it."""
        engine = cls.__new__(cls)
        engine._start(settings, mode, None)
        return engine

    def _start(self, settings: Settings, mode: Mode, policy: SchedulePolicy | None) -> None:
        _check_mode(mode, policy)
        self.settings, self.mode = settings, mode
        self.pipeline = Pipeline(settings, mode, policy)
        self._app: FastAPI | None = None
        self._servers: list[ServerHandle] = []
        self._lifespan: Any = None
        self._at_exit = functools.partial(_close_forgotten, weakref.WeakMethod(self.close))
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ requests

    def chat(self, messages: str | Sequence[Message], **params: object) -> ChatReply:
        """Answer a conversation. `messages` may be one user text; `params` are those of chat completions."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"messages": list(messages), "model": self.settings.served_model_name, **params, "stream": False}
        raw = self._call(self._post("/v1/chat/completions", body))
        choice = raw["choices"][0]
        return ChatReply(
            text=choice["message"]["content"] or "",
            rid=raw["id"],
            finish_reason=choice["finish_reason"],
            usage=raw["usage"],
            raw=raw,
        )

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        **options: Any,
    ) -> Any:
        """SGLang-shaped outputs `{"text", "output_ids", "meta_info"}`: one for a prompt, a list for a list.

        Args:
            prompt: text or texts; or `input_ids`.
            sampling_params: as in `/generate`; a list gives each prompt its own.
            options: rid, return_logprob, top_logprobs_num, extra_key.
        """
        return self._call(self.async_generate(prompt, sampling_params, input_ids=input_ids, **options))

    async def async_generate(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **options: Any
    ) -> Any:
        """`generate` for a running loop (any loop)."""
        obj = _native_request(prompt, sampling_params, stream=False, **options)
        return await self._in_engine(self._whole(obj))

    async def stream(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **options: Any
    ) -> AsyncIterator[Output]:
        """Outputs as they grow (text so far, `index` for lists), in any running loop. Leaving early aborts."""
        obj = _native_request(prompt, sampling_params, stream=True, **options)
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()
        future = self.pipeline.loop.submit(
            self._pump(obj, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        )
        try:
            while (item := await items.get()) is not _END:
                yield _raised(item)
        finally:
            future.cancel()

    def stream_sync(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **options: Any
    ) -> Iterator[Output]:
        """`stream` for plain loops: `for part in engine.stream_sync("...")`."""
        obj = _native_request(prompt, sampling_params, stream=True, **options)
        items: queue.Queue[Any] = queue.Queue()
        future = self.pipeline.loop.submit(self._pump(obj, items.put))
        try:
            while (item := items.get()) is not _END:
                yield _raised(item)
        finally:
            future.cancel()

    def abort(self, rid: str) -> None:
        """End exactly the request `rid`; unknown rids are ignored."""
        self.pipeline.loop.loop.call_soon_threadsafe(self.pipeline.manager.abort_request, rid)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False if requests are under way."""
        return self._call(self.pipeline.manager.flush_cache()).success

    def internal_state(self) -> dict[str, Any]:
        """The scheduler's own account: queues, memory, limits."""
        return self._call(self.pipeline.manager.get_internal_state()).state

    # ------------------------------------------------------------------ server and recording

    def serve(self, host: str | None = None, port: int | None = None) -> Server:
        """Open the OpenAI endpoint on this engine; port 0 takes a free one. StartupError if it is taken."""
        serve = self.settings.serve
        chosen = serve.port if port is None else port

        async def start() -> ServerHandle:
            app = create_app(self._serving_context())
            return await ServerHandle.start(app, host or serve.host, chosen)

        handle = self._call(start())
        self._servers.append(handle)
        return Server(self, handle)

    def recording(self) -> Recording:
        """The events so far as tables; brought up to date whenever it is looked at."""
        ring = self.pipeline.ring
        anchors = tuple(
            ClockAnchor(component=i.component, pid=i.pid, unix_ns=i.unix_ns, monotonic_ns=i.monotonic_ns)
            for i in self.pipeline.infos.values()
        )
        header = Header(settings=self.settings.public(), anchors=anchors)
        return Recording.live(ring.snapshot, header, total=lambda: ring.total, dropped=lambda: ring.dropped)

    # ------------------------------------------------------------------ life

    def close(self, grace: float | None = None) -> None:
        """Let running requests finish (at most `grace` seconds), then end every thread, process and socket."""
        atexit.unregister(self._at_exit)
        self.pipeline.stop(grace, before_end=self._close_servers)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if kind is not None else None)

    def __repr__(self) -> str:
        state = self.pipeline.status.state
        return f"<sgviz.Engine {self.settings.model.model_path} in {self.mode}, {state}>"

    # ------------------------------------------------------------------ inside

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.pipeline.loop.call(coroutine)

    async def _in_engine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the engine's loop, wherever the caller is."""
        if asyncio.get_running_loop() is self.pipeline.loop.loop:
            return await coroutine
        return await asyncio.wrap_future(self.pipeline.loop.submit(coroutine))

    async def _whole(self, obj: GenerateReqInput) -> Any:
        async for output in self.pipeline.manager.generate_request(obj):
            for one in output if isinstance(output, list) else [output]:
                _raise_failure(one)
            return output
        raise SgvizError("the engine gave no answer")

    async def _pump(self, obj: GenerateReqInput, put: Callable[[Any], object]) -> None:
        try:
            async for output in self.pipeline.manager.generate_request(obj):
                put(output)
        except Exception as error:
            put(error)
        finally:
            put(_END)

    async def _post(self, path: str, body: Message) -> dict[str, Any]:
        """A request through the very app that serves HTTP, without the socket."""
        app = await self._in_process_app()
        keys = self.settings.serve
        headers = {"authorization": f"Bearer {keys.api_key}"} if keys.api_key else {}
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url=IN_PROCESS_URL, timeout=None) as client:
            response = await client.post(path, json=body, headers=headers)
        answer: dict[str, Any] = response.json()
        if response.status_code != 200:
            error = answer["error"]
            raise from_status(response.status_code, error["message"], param=error["param"])
        return answer

    async def _in_process_app(self) -> FastAPI:
        if self._app is None:
            self._app = create_app(self._serving_context())
            self._lifespan = self._app.router.lifespan_context(self._app)
            await self._lifespan.__aenter__()
        return self._app

    async def _close_servers(self) -> None:
        for handle in self._servers:
            await handle.stop(SERVER_STOP_S)
        self._servers.clear()
        if self._lifespan is not None:
            await self._lifespan.__aexit__(None, None, None)
            self._lifespan = None

    def _serving_context(self) -> ServingContext:
        pipeline, serve = self.pipeline, self.settings.serve
        return ServingContext(
            tokenizer_manager=pipeline.manager,
            tokenizer=pipeline.tokenizer,
            templates=Templates(pipeline, self.settings.model.chat_template),
            facts=self._facts(),
            trace=pipeline.http_trace,
            status=pipeline.status,
            settings=self.settings.flat(),
            keys=Keys(api_key=serve.api_key, admin_api_key=serve.admin_api_key),
            enable_cache_report=serve.enable_cache_report,
            default_include_usage=serve.stream_response_default_include_usage,
        )

    def _facts(self) -> ModelFacts:
        info, model = self.pipeline.infos["scheduler"], self.settings.model
        return ModelFacts(
            served_model_name=self.settings.served_model_name,
            model_path=model.model_path,
            tokenizer_path=model.tokenizer_path or model.model_path,
            context_len=info.context_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            version=__version__,
            default_sampling=_default_sampling(self.pipeline),
        )


class Templates:
    """Chat templates: the model's own, or the file that the settings name."""

    def __init__(self, pipeline: Pipeline, path: str | None) -> None:
        self._tokenizer = pipeline.tokenizer
        self._source: str | None = None
        if path is not None:
            try:
                with open(path, encoding="utf-8") as file:
                    self._source = file.read()
            except OSError as error:
                raise ConfigError(f"chat_template {path!r} cannot be read: {error.strerror}") from error

    def apply(
        self, messages: list[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, self._source, **kwargs)


def _native_request(
    prompt: str | list[str] | None,
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
    *,
    stream: bool,
    input_ids: list[int] | list[list[int]] | None = None,
    **options: Any,
) -> GenerateReqInput:
    """A GenerateReqInput from the arguments of `generate`; unknown options are refused by name."""
    allowed = ("rid", "return_logprob", "top_logprobs_num", "extra_key", "return_text_in_logprobs")
    unknown = next((name for name in options if name not in allowed), None)
    if unknown is not None:
        raise BadRequest(f"generate: unknown option {unknown!r}; allowed are {', '.join(allowed)}", param=unknown)
    params: SamplingParams | list[SamplingParams]
    if isinstance(sampling_params, list):
        params = [native_sampling(each) for each in sampling_params]
    else:
        params = native_sampling(sampling_params or {})
    return GenerateReqInput(text=prompt, input_ids=input_ids, sampling_params=params, stream=stream, **options)


def _raise_failure(output: Output) -> None:
    """An answer that ended by an error with a status is an exception in Python."""
    reason = output["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort" and reason.get("status_code"):
        raise from_status(reason["status_code"], reason["message"])


def _raised(item: Any) -> Output:
    if isinstance(item, Exception):
        raise item
    _raise_failure(item)
    output: Output = item
    return output


def _default_sampling(pipeline: Pipeline) -> dict[str, float]:
    """Sampling defaults of the model's generation_config.json, where it has one."""
    path = pipeline.model_dir / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    return {name: config[name] for name in DEFAULT_SAMPLING if isinstance(config.get(name), (int, float))}  # type: ignore[misc]


def _check_mode(mode: str, policy: object) -> None:
    if mode not in ("threads", "processes"):
        raise ConfigError(f"mode {mode!r} is not one of threads, processes")
    if policy is not None and mode == "processes":
        raise ConfigError(
            "a policy given as an object works in mode='threads' only: the scheduler is another process; "
            "name it instead (module:Class or file.py:Class)"
        )


def _is_normal(event_loop: str) -> bool:
    if event_loop not in ("normal", "overlap"):
        raise ConfigError(f"event_loop {event_loop!r} is not one of normal, overlap")
    return event_loop == "normal"


def _close_forgotten(reference: weakref.WeakMethod[Any]) -> None:
    """At interpreter exit: an engine that nobody closed must not leave processes."""
    close = reference()
    if close is not None:
        close(0.0)
