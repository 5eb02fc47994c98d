"""Engine: one pipeline with a face for Python. Mirrors SGLang's Engine, with chat, a server and a live recording.

Works in a script and in a notebook: the engine's own event loop runs in a thread, so blocking, async and
streaming calls need no patched loop. Every call takes the way an HTTP request takes. Imports: everything.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from sgviz.config import Settings
from sgviz.debugger import Debugger, EngineLink
from sgviz.debugger.debugger import TIMEOUT_S
from sgviz.engine.chat import ChatReply, chat_body
from sgviz.engine.given import Mode, check_mode, check_nodes, check_one_scheduler, check_options, settings_of
from sgviz.engine.http_face import HttpFace, Message, Server
from sgviz.engine.native import END, PythonCalls, embedding_request, native_request
from sgviz.engine.newest import Newest
from sgviz.engine.worker_face import check_no_workers
from sgviz.errors import ConfigError, Unavailable
from sgviz.launch.components import tell_started
from sgviz.launch.live_recording import recording_of
from sgviz.launch.pipeline import Pipeline
from sgviz.messages.debug import LEASE_S
from sgviz.messages.flow import Load, PauseMode
from sgviz.recording import Recording
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.tokenizer_manager import Output

T = TypeVar("T")
LAST_PORT = 65535
UPDATE_OPTIONS = ("flush_cache", "abort_all_requests", "weight_version")
PROFILE_OPTIONS = ("activities", "with_stack", "record_shapes", "profile_id")


class Engine:
    """A running pipeline.

    Args:
        model: same as `model_path`: the default model's name, a tiny model's, a folder or a hub id.
        mode: components as threads of this process (default) or as processes.
        event_loop: normal or overlap; same as `disable_overlap_schedule`.
        schedule_policy: a policy's name, your own class as module:Class or file.py:Class, or (threads only)
            an object with `name` and `order`; see `sgviz.scheduler.policy`.
        settings: any other setting of `sgviz.config` by its name.

    An engine that nobody refers to any more (nor to a server of it) closes itself.

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
        given = {"model": model, "event_loop": event_loop, "schedule_policy": schedule_policy, **settings}
        whole = settings_of(given)
        check_no_workers(whole)
        check_one_scheduler(whole, policy)
        self._start(whole, mode, policy)

    @classmethod
    def from_settings(cls, settings: Settings, *, mode: Mode = "threads", by_workers: bool = False) -> Engine:
        """An engine from a whole Settings object, as the command line makes it.

        `by_workers`: it is there to be served, by tokenizer workers if so set.
        """
        engine = cls.__new__(cls)
        if not by_workers:
            check_no_workers(settings)
        engine._start(settings, mode, None)
        return engine

    def _start(self, settings: Settings, mode: Mode, policy: SchedulePolicy | None) -> None:
        check_mode(mode, policy)
        check_nodes(settings, mode)
        self.settings, self.mode = settings, mode
        self._closed = False
        self.pipeline = Pipeline(settings, mode, policy)
        self.settings = self.pipeline.settings  # with the ports that it took
        trace = self.pipeline.make_tracer("engine")
        tell_started(trace, mode)
        self._calls = PythonCalls(self.pipeline.manager, trace, settings.served_model_name)
        self._http = HttpFace(self.pipeline, functools.partial(_recording_of, self.pipeline))
        self._forgotten = weakref.finalize(self, _stop_soon, self.pipeline, self._http)
        self._forgotten.atexit = False
        self._at_exit = functools.partial(_close_forgotten, weakref.WeakMethod(self.close))
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ requests

    def chat(self, messages: str | Sequence[Message], **params: object) -> ChatReply:
        """Answer a conversation. `messages` may be one user text; `params` are those of chat completions.

        With n > 1 the reply is the first; all of them are in its `raw`.

        Raises:
            BadRequest: a parameter has no such name, or something has a value that is not allowed.
        """
        body = chat_body(messages, {"model": self.settings.served_model_name, **params})
        return ChatReply.of(self._call(self._http.post("/v1/chat/completions", body)))

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
            options: rid, extra_key; return_logprob with top_logprobs_num, token_ids_logprob, logprob_start_len
                (-1: none of the prompt) and return_text_in_logprobs; custom_logit_processor, a name; priority;
                session_params, of a turn (see `open_session`); routed_dp_rank, of several ranks the one to run it;
                bootstrap_host, bootstrap_port, bootstrap_room and disagg_prefill_dp_rank, of one side of a pair.
        """
        return self._call(self.async_generate(prompt, sampling_params, input_ids=input_ids, **options))

    async def async_generate(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **options: Any
    ) -> Any:
        """`generate` for a running loop (any loop)."""
        obj = native_request(prompt, sampling_params, stream=False, **options)
        return await self._in_engine(self._calls.whole(obj))

    def encode(self, prompt: str | list[str] | None = None, **options: Any) -> Any:
        """Vectors of length 1, SGLang-shaped: `{"embedding", "meta_info"}` for a prompt, a list for a list.

        Args:
            options: input_ids in place of `prompt`; rid, dimensions, extra_key, priority, routed_dp_rank.
        """
        return self._call(self.async_encode(prompt, **options))

    async def async_encode(self, prompt: str | list[str] | None = None, **options: Any) -> Any:
        """`encode` for a running loop (any loop)."""
        return await self._in_engine(self._calls.whole(embedding_request(prompt, **options)))

    async def stream(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **options: Any
    ) -> AsyncIterator[Output]:
        """Outputs as they grow (text so far, `index` for lists), in any running loop. Leaving early aborts.

        A reader slower than the engine gets the newest of each answer and skips those before it.
        """
        obj = native_request(prompt, sampling_params, stream=True, **options)
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop has ended, and its reading with it
                loop.call_soon_threadsafe(news.set)

        items = Newest(tell)
        future = self.pipeline.loop.submit(self._calls.pump(obj, items.put))
        try:
            while (item := items.take()) is not END:
                if item is not None:
                    yield _raised(item)
                    continue
                await news.wait()
                news.clear()
        finally:
            future.cancel()

    def stream_sync(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **options: Any
    ) -> Iterator[Output]:
        """`stream` for plain loops: `for part in engine.stream_sync("...")`."""
        obj = native_request(prompt, sampling_params, stream=True, **options)
        news = threading.Event()
        items = Newest(news.set)
        future = self.pipeline.loop.submit(self._calls.pump(obj, items.put))
        try:
            while (item := items.take()) is not END:
                if item is not None:
                    yield _raised(item)
                    continue
                news.wait()
                news.clear()
        finally:
            future.cancel()

    def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        *,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Open a session and return its id; `session_params={"id": ..., "rid": ...}` of `generate` makes a turn of it.

        Args:
            capacity_of_str_len: characters that the prompt of a turn may have, its context included.
            streaming: each turn goes on from the one before, and no `rid` is given.
            timeout: seconds without a turn after which it closes by itself; None: when the engine closes.

        Raises:
            BadRequest: a session of that name is open, or a value is not allowed.
        """
        desk = self.pipeline.manager.sessions
        return self._call(desk.open(capacity_of_str_len, session_id, streaming=streaming, timeout=timeout))

    def close_session(self, session_id: str) -> None:
        """Forget a session and end its turns. Raises BadRequest if none of that name is open."""
        self._call(self.pipeline.manager.sessions.close(session_id))

    def abort(self, rid: str) -> None:
        """End exactly the request `rid`; unknown rids are ignored."""

        async def abort() -> None:
            self.pipeline.manager.abort_request(rid)

        self.pipeline.loop.submit(abort())

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False if requests are under way."""
        return self._call(self.pipeline.manager.flush_cache()).success

    def pause_generation(self, mode: PauseMode = "abort") -> int:
        """Let no new request begin; returns how many are held. See `ControlDesk.pause_generation` for the modes."""
        return self._call(self.pipeline.manager.control.pause_generation(mode))

    def continue_generation(self) -> None:
        """End a pause: what was held goes on as if nothing had been."""
        self._call(self.pipeline.manager.control.continue_generation())

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **options: Any
    ) -> str:
        """Run with other weights of the same model; returns what was done. BadRequest if they cannot be: the old go on.

        `options`: flush_cache (True), abort_all_requests (False), weight_version (stays).
        """
        check_options("update_weights_from_disk", options, UPDATE_OPTIONS)
        control = self.pipeline.manager.control
        return self._call(control.update_weights_from_disk(model_path, load_format, **options)).message

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> None:
        """Name the weights otherwise in answers; requests under way end before that, or else tell where it changed."""
        self._call(self.pipeline.manager.control.update_weight_version(new_version, abort_all_requests))

    def start_profile(
        self, output_dir: str | None = None, num_steps: int | None = None, **options: Any
    ) -> str:
        """Let torch's profiler watch the scheduler; returns where its Chrome trace will be. BadRequest if one does.

        `options`: activities (all there are), with_stack, record_shapes (False), profile_id (the time).
        """
        check_options("start_profile", options, PROFILE_OPTIONS)
        return self._call(self.pipeline.manager.control.start_profile(output_dir, num_steps, **options))

    def stop_profile(self) -> str:
        """End the profile; returns where its trace is. BadRequest if there is none."""
        return self._call(self.pipeline.manager.control.stop_profile())

    def slow_down(self, forward_sleep_time: float | None) -> None:
        """Put off each forward by so many seconds, to see what a slower device would do; None: no more."""
        self._call(self.pipeline.manager.control.slow_down(forward_sleep_time))

    def get_load(self) -> Load:
        """How busy the scheduler is; of several ranks all together."""
        return self._call(self.pipeline.manager.control.get_load())

    def internal_state(self) -> dict[str, Any]:
        """The scheduler's own account: queues, memory, limits; of several ranks the sums, and each in `ranks`."""
        return self._call(self.pipeline.manager.get_internal_state()).state

    # ------------------------------------------------------------------ server and recording

    def serve(self, host: str | None = None, port: int | None = None) -> Server:
        """Open the OpenAI endpoint on this engine; port 0 takes a free one. StartupError if it is taken."""
        if port is not None and not 0 <= port <= LAST_PORT:
            raise ConfigError(f"port must be between 0 and {LAST_PORT}, got {port}", param="port")
        server = self._call(self._http.serve(host, port))
        server.engine = self  # who holds the server need not hold the engine
        return server

    def recording(self) -> Recording:
        """The events so far as tables; brought up to date whenever it is looked at."""
        return _recording_of(self.pipeline)

    def set_events(self, on: bool) -> None:
        """Switch events on or off in all components, for requests that come from now on.

        Raises:
            ConfigError: the engine was started with `disable_events`.
        """
        if self.settings.observe.disable_events:
            raise ConfigError("this engine was started with disable_events; it has nowhere to send events to")

        async def switch() -> None:
            self.pipeline.set_events(on)

        self._call(switch())

    def debugger(self, *, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> Debugger:
        """A step debugger on this engine's scheduler, as a context manager; see `sgviz.debugger`.

        Raises:
            ConfigError: the scheduler is another process, and enable_debugger was not set.
            BadRequest: events are switched off. Unavailable: another debugger is attached.
        """
        threads = self.mode == "threads"
        if not threads and not self.settings.serve.enable_debugger:
            raise ConfigError(
                "with mode='processes' a debugger can attach only to an engine made with enable_debugger=True",
                param="enable_debugger",
            )
        pipeline = self.pipeline
        predicates = pipeline.predicates if threads else None
        link = EngineLink(pipeline.loop, pipeline.manager, predicates, self.recording)
        return Debugger(link, lease_s=lease_s, timeout_s=timeout_s)

    # ------------------------------------------------------------------ life

    def close(self, grace: float | None = None) -> None:
        """Let running requests finish (at most `grace` seconds), then end every thread, process and socket."""
        self._closed = True
        atexit.unregister(self._at_exit)
        self._forgotten.detach()
        self.pipeline.stop(grace, before_end=self._http.close)

    def __enter__(self) -> Engine:
        if self._closed:
            raise Unavailable("the engine is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if kind is not None else None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.pipeline.status.state
        return f"<sgviz.Engine {self.settings.model.model_path} in {self.mode}, {state}>"

    # ------------------------------------------------------------------ inside

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.pipeline.loop.call(coroutine)

    async def _in_engine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the engine's loop, wherever the caller is."""
        if asyncio.get_running_loop() is self.pipeline.loop.loop:
            return await coroutine
        return await asyncio.wrap_future(self.pipeline.loop.submit(coroutine))


def _raised(item: Any) -> Output:
    if isinstance(item, Exception):
        raise item
    output: Output = item
    return output


def _recording_of(pipeline: Pipeline) -> Recording:
    return recording_of(pipeline.ring, pipeline.header())


def _stop_soon(pipeline: Pipeline, http: HttpFace) -> None:
    """The last reference to an engine is gone: end it, from whatever thread the collector runs in."""
    stop = functools.partial(pipeline.stop, 0.0, before_end=http.close)
    threading.Thread(target=stop, name="sgviz-forgotten").start()


def _close_forgotten(reference: weakref.WeakMethod[Any]) -> None:
    """At interpreter exit: an engine that nobody closed must not leave processes."""
    close = reference()
    if close is not None:
        close(0.0)
