"""A tokenizer worker: HTTP, templates, tokenizer and TokenizerManager in a process of their own, on a shared port.

It takes the main process's router for the scheduler, does what that orders, and passes on what concerns the engine as
a whole. Its two components are `http-N` and `tokenizer_manager-N`, so that a recording tells which worker had a
request. Mirrors SGLang's TokenizerWorker. Imports: serving, tokenizer_manager, channel, messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from sgviz.channel import EVENT_HWM, AsyncReceiver, Sender
from sgviz.errors import StartupError
from sgviz.events import BufferSink, Event, Tracer, WallClock
from sgviz.events.tracer import FLUSH_EVERY_NS
from sgviz.launch.components import CLOSE_LINGER_MS, Context, tell_started
from sgviz.launch.http_parts import keys_of, limits_of, serving_context
from sgviz.launch.messages import InitInfo, WorkerBoot
from sgviz.launch.templates import Templates
from sgviz.messages import ConfigureTraceReq, ShutdownReq, ToTokenizer
from sgviz.messages.workers import (
    ConfigureLoggingReq,
    DrainReq,
    EngineFailedReq,
    HttpNoted,
    OrderDone,
    TokenizerWorkerRegistrationReq,
    WorkerOrder,
    WorkerWelcome,
)
from sgviz.model.tokenizer import Tokenizer
from sgviz.serving.app import create_app
from sgviz.serving.context import ServerState, ServerStatus
from sgviz.serving.counting import CountingMiddleware
from sgviz.serving.pass_on import MainProcess, PassOn
from sgviz.serving.server import ServerHandle, loop_factory
from sgviz.tokenizer_manager import RequestLog, TokenizerManager
from sgviz.tokenizer_manager.ranks import Ranks
from sgviz.tokenizer_manager.weights import Weights

ToWorker = ToTokenizer | WorkerOrder | ConfigureTraceReq | ShutdownReq
NOISY = ("httpx2", "httpcore2", "uvicorn.error")

log = logging.getLogger(__name__)
LAST_ABORTS_S = 1.0
LAST_BYTES_S = 1.0


def run_tokenizer_worker(context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Serve until a ShutdownReq."""
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(context, ready))


async def _serve(context: Context, ready: Callable[[InitInfo], None]) -> None:
    assert context.worker is not None
    worker = TokenizerWorker(context, context.worker)
    try:
        await worker.open()
        unix_ns, monotonic_ns = WallClock.anchor()
        name = worker.http_trace.component
        ready(InitInfo(component=name, pid=os.getpid(), unix_ns=unix_ns, monotonic_ns=monotonic_ns))
        await worker.until_end()
    finally:
        await worker.close()


class LoopSink(BufferSink):
    """Events of one asyncio loop, passed on a little later, so that no message of tokens costs one of events."""

    def put(self, event: Event) -> None:
        if not self._buffer:
            asyncio.get_running_loop().call_later(FLUSH_EVERY_NS / 1e9, super().flush)
        super().put(event)

    def flush(self) -> None:
        if len(self._buffer) >= self._batch:
            super().flush()

    def close(self) -> None:
        super().flush()


class TokenizerWorker:
    """What one worker consists of. One asyncio loop owns it."""

    def __init__(self, context: Context, boot: WorkerBoot) -> None:
        self._context, self._boot, settings = context, boot, context.settings
        self._status = ServerStatus(ServerState.UP)
        self._log = RequestLog(
            settings.observe.log_requests,
            settings.observe.log_requests_level,
            settings.observe.log_requests_format,
        )
        self._events = Sender(context.zmq, context.ports.events_ipc_name, hwm=EVENT_HWM)
        self._sink = LoopSink(self._events.send_events)
        self.http_trace, self._trace = self._tracer("http"), self._tracer("tokenizer_manager")
        self._sender = Sender(context.zmq, context.ports.scheduler_input_ipc_name)
        self._receiver: AsyncReceiver[ToWorker] = AsyncReceiver(
            context.zmq, context.ports.tokenizer_ipc_name, ToWorker
        )
        self._main = MainProcess(boot.main_path)
        self._welcome = asyncio.Event()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders: set[asyncio.Task[None]] = set()  # membership only
        self._tokenizer = Tokenizer.load(Path(context.tokenizer_dir))
        self._manager = self._make_manager()
        self._handle: ServerHandle | None = None

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Say hello, and take requests when the main process can answer."""
        self._sender.send(TokenizerWorkerRegistrationReq())
        self._manager.start()
        limit = self._context.settings.serve.startup_timeout
        try:
            async with asyncio.timeout(limit):  # for the slowest of the workers
                await self._welcome.wait()
        except TimeoutError:
            raise StartupError(
                f"not all tokenizer workers came within {limit:g} s (startup_timeout)"
            ) from None
        for trace in (self.http_trace, self._trace):
            tell_started(trace, self._context.mode)
        settings = self._context.settings
        self._handle = await ServerHandle.start(
            create_app(self._serving_context()),
            settings.serve.host,
            http=settings.http,
            listener=socket.socket(fileno=self._boot.listener_fd),
        )

    async def until_end(self) -> None:
        """Returns when the main process says so; raises if nothing can be received any more."""
        await self._end

    async def close(self) -> None:
        """Last bytes, last events."""
        if self._handle is not None:
            await self._handle.stop(LAST_BYTES_S)
        await self._manager.close()
        await self._main.close()
        for trace in (self.http_trace, self._trace):
            if trace.on:
                trace.tell_cost()
        self._sink.close()
        self._receiver.close()
        for sender in (self._events, self._sender):
            sender.close(CLOSE_LINGER_MS)

    # ------------------------------------------------------------ parts

    def _tracer(self, kind: str) -> Tracer:
        name = f"{kind}-{self._boot.number}"
        return Tracer(name, None if self._context.settings.observe.disable_events else self._sink)

    def _make_manager(self) -> TokenizerManager:
        settings = self._context.settings
        return TokenizerManager(
            codec=self._tokenizer,
            sender=self._sender,
            receiver=self,
            trace=self._trace,
            limits=limits_of(settings, self._boot.scheduler),
            weights=Weights(settings.model.model_path, settings.model.weight_version),
            request_timeout=settings.http.request_timeout,
            request_log=self._log,
            on_failure=self._fail,
            is_worker=True,
            ranks=Ranks(settings.parallel.dp_size),
        )

    def _serving_context(self) -> Any:
        settings = self._context.settings
        return serving_context(
            settings,
            self._boot.scheduler,
            Path(self._boot.model_dir),
            manager=self._manager,
            tokenizer=self._tokenizer,
            templates=Templates(self._tokenizer, settings.model.chat_template),
            trace=self.http_trace,
            status=self._status,
            request_log=self._log,
            mounts=[self._mount],
        )

    def _mount(self, app: FastAPI) -> None:
        app.add_middleware(CountingMiddleware, counts=self)
        settings = self._context.settings
        app.add_middleware(
            PassOn,
            main=self._main,
            http=settings.http,
            keys=keys_of(settings),
            rules=app.state.access,
            counts=self,
        )

    # ------------------------------------------------------------ counts of HTTP requests

    def came(self, endpoint: str, method: str) -> None:
        self._sender.send(HttpNoted(endpoint=endpoint, method=method))

    def left(self, endpoint: str, method: str, status: str) -> None:
        self._sender.send(HttpNoted(endpoint=endpoint, method=method, status=status))

    # ------------------------------------------------------------ orders

    async def recv(self) -> ToTokenizer:
        """The next message for the TokenizerManager; orders before it are begun."""
        while True:
            message = await self._receiver.recv()
            if isinstance(message, ShutdownReq):
                if not self._end.done():
                    self._end.set_result(None)
            elif isinstance(message, ConfigureTraceReq):
                self._set_events(message.on)
            elif isinstance(message, WorkerOrder):
                self._begin(message)
            else:
                return message

    def _begin(self, order: WorkerOrder) -> None:
        match order:
            case WorkerWelcome():
                self._set_events(order.events_on)
                self._welcome.set()
            case ConfigureLoggingReq():
                self._log.configure(order.on, order.level, order.form)
            case EngineFailedReq():
                self._status.message, self._status.state = order.message, ServerState.UNHEALTHY
                self._manager.fail_all(order.message)
            case DrainReq():
                self._status.state = ServerState.STOPPING
                self._spawn(self._drain(order), order.id)
            case _:
                self._spawn(self._manager.follower.do(order), getattr(order, "id", ""))

    def _set_events(self, on: bool) -> None:
        for trace in (self.http_trace, self._trace):
            trace.on = on and not self._context.settings.observe.disable_events

    def _spawn(self, work: Coroutine[Any, Any, None], order: str) -> None:
        """Do it, and say so; orders begin in the order in which they come."""

        async def obey() -> None:
            await work
            if order:
                self._sender.send(OrderDone(id=order))

        task = asyncio.get_running_loop().create_task(obey())
        self._orders.add(task)
        task.add_done_callback(self._on_order_end)

    def _on_order_end(self, task: asyncio.Task[None]) -> None:
        self._orders.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"an order could not be done: {type(error).__name__}: {error}")

    async def _drain(self, order: DrainReq) -> None:
        manager = self._manager
        manager.refuse_new(order.message)
        manager.follower.release()
        if manager.rid_to_state and not await manager.drained(order.grace):
            if order.grace:
                log.warning("requests did not finish in %.0f s; aborting them", order.grace)
            manager.abort_request(abort_all=True)
            await manager.drained(LAST_ABORTS_S)

    def _fail(self, why: str) -> None:
        if not self._end.done():
            self._end.set_exception(RuntimeError(why))
