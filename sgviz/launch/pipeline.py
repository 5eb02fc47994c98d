"""The whole pipeline of one engine: sockets, children, TokenizerManager, events; started and stopped as one.

Mirrors SGLang's `_launch_subprocesses`, its warm-up and its watchdog over children. Start either succeeds or
leaves nothing; `stop` may be called any number of times and from any thread but the engine's own loop.
Imports: all engine rooms, and `recording` for the file sink (a bridge may).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from sgviz.channel import AsyncReceiver, PortArgs, Sender
from sgviz.config import Settings
from sgviz.data_parallel.nodes import addresses_of
from sgviz.errors import StartupError, Unavailable
from sgviz.events import RingSink, Tracer
from sgviz.launch.children import CHILD_STOP_S, Children
from sgviz.launch.components import Context, tell_started
from sgviz.launch.crash_dump import CrashDump
from sgviz.launch.ending import end_processes
from sgviz.launch.event_collector import EventCollector
from sgviz.launch.http_parts import limits_of
from sgviz.launch.kv_parts import start_bootstrap
from sgviz.launch.live_recording import configured_of, header_of
from sgviz.launch.loop_thread import LoopThread
from sgviz.launch.messages import InitInfo
from sgviz.launch.processes import ChildProcess
from sgviz.launch.ranks import check_policies, common_info, rank_of, schedulers_of
from sgviz.launch.templates import Templates
from sgviz.launch.threads import switch_interval
from sgviz.launch.tokenizer_router import MultiTokenizerRouter
from sgviz.launch.tokenizer_workers import TokenizerWorkers
from sgviz.launch.warm_up import warm_up
from sgviz.messages import ConfigureTraceReq, ShutdownReq, ToTokenizer
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer
from sgviz.recording.sink import FileSink
from sgviz.recording.store import Header
from sgviz.scheduler.gate import LocalPredicates
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.serving.context import ServerState, ServerStatus
from sgviz.serving.server import loop_factory
from sgviz.tokenizer_manager import RequestLog, TokenizerManager
from sgviz.tokenizer_manager.ranks import Ranks
from sgviz.tokenizer_manager.weights import Weights

log = logging.getLogger(__name__)

LAST_ABORTS_S = 1.0
CONNECT_TIMEOUT_MS = 10_000


class Pipeline:
    """A started pipeline.

    Attributes:
        status: up, stopping or unhealthy; the HTTP layer reads it.
        ring: the newest events of all components.
        dead: set when a component died although nobody asked it to stop.
        forced: the components that did not leave by themselves at an orderly stop.
        router: to the tokenizer workers, where there are to be any.
    """

    def __init__(self, settings: Settings, mode: str, policy: SchedulePolicy | None = None) -> None:
        self.settings, self.mode = settings, mode
        self.status = ServerStatus()
        self.ring = RingSink(settings.observe.event_capacity)
        self.dead = threading.Event()
        self.infos: dict[str, InitInfo] = {}
        self._lost: set[int] = set()  # ranks; membership and size only
        self._ranks_lock = threading.Lock()
        self._ranks = Ranks(settings.parallel.dp_size, one_process=mode == "threads")
        self._tracers: list[Tracer] = []
        self.router: MultiTokenizerRouter | None = None
        self._stop_lock = threading.Lock()
        self._stopping = self._stopped = False
        self.forced: list[str] = []
        self._patience = CHILD_STOP_S
        self._policy = policy
        self.predicates = LocalPredicates()
        told = settings.observe
        self.request_log = RequestLog(told.log_requests, told.log_requests_level, told.log_requests_format)
        self._exit = contextlib.ExitStack()  # undoes the start, last first
        try:
            self._start()
        except BaseException:
            self._stopping = True
            self._exit.close()
            raise

    # ------------------------------------------------------------------ start

    def _start(self) -> None:
        check_policies(self.settings)  # a mistyped name shows before anything is started
        self.model_dir = resolve_model(self.settings.model.model_path)
        self.tokenizer_dir = self._tokenizer_dir()
        self.tokenizer = Tokenizer.load(self.tokenizer_dir)
        self.templates = Templates(self.tokenizer, self.settings.model.chat_template)
        self.settings, end = start_bootstrap(self.settings)
        self._exit.callback(end)
        self._start_file()
        self._dump = self._crash_dump()
        self._open_sockets()
        self.trace = self.make_tracer("tokenizer_manager")
        self.http_trace = self.make_tracer("http")
        children = self._start_children()
        self._start_manager()
        children.watch(self._on_death)
        self._emit_started()
        self._warm_up()
        self.status.state = ServerState.UP
        if self.dead.is_set():
            raise StartupError(self.status.message)

    def _tokenizer_dir(self) -> Path:
        path = self.settings.model.tokenizer_path
        return resolve_model(path) if path else self.model_dir

    def _open_sockets(self) -> None:
        self.zmq: zmq.Context[Any] = zmq.Context()
        self._exit.callback(self.zmq.destroy, 0)
        if self.mode == "threads":
            self.ports = PortArgs.for_threads()
            switch_interval.take()
            self._exit.callback(switch_interval.give_back)
        else:
            self.ports, folder = PortArgs.for_processes(addresses_of(self.settings.parallel))
            self._exit.callback(_remove, folder)
            collector = EventCollector(self.zmq, self.ports.inbox("events"), self.ring)
            self._exit.callback(collector.stop)
        self._sender = Sender(self.zmq, self.ports.scheduler_input_ipc_name, bind=True)
        self._exit.callback(self._sender.close, int(CHILD_STOP_S * 1000))
        # beside user code (a notebook's own loop, threads) it stays asyncio's own
        self.loop = LoopThread(
            new_loop=loop_factory() if self.mode == "processes" else asyncio.new_event_loop
        )
        self._exit.callback(self.loop.stop)

    def _start_file(self) -> None:
        path = self.settings.observe.record
        if path is None:
            return
        sink = FileSink(path, Header(settings=self.settings.public()))
        self._exit.callback(sink.close)
        self._exit.callback(self.ring.subscribe(sink))

    def _crash_dump(self) -> CrashDump | None:
        folder = self.settings.observe.crash_dump_folder
        if folder is None:
            return None
        dump = CrashDump(folder, self.ring, self.header)
        self._exit.callback(dump.join)
        return dump

    def make_tracer(self, component: str) -> Tracer:
        """A tracer into the ring for a component of the main process."""
        tracer = Tracer(component, None if self.settings.observe.disable_events else self.ring)
        self._tracers.append(tracer)
        return tracer

    def set_events(self, on: bool) -> None:
        """Emit events in all components, or in none. Runs in the engine's loop."""
        for tracer in self._tracers:
            tracer.on = on
        self._sender.send(ConfigureTraceReq(on=on))
        if self.router is not None:
            self.router.set_events(on)

    def _start_children(self) -> Children:
        context = Context(
            settings=self.settings,
            ports=self.ports,
            zmq=self.zmq,
            tokenizer_dir=str(self.tokenizer_dir),
            mode=self.mode,
            give_up=log.critical,  # each child puts its own in its place
            sink=self.ring,
            policy=self._policy,
            predicates=self.predicates,
        )
        children = Children(context, self._sender)
        self._exit.callback(self._end_children, children)
        self.infos = children.start()
        return children

    @property
    def scheduler_info(self) -> InitInfo:
        """What the scheduler told when it was ready; of several ranks what holds for all."""
        return common_info(self.infos, schedulers_of(self.settings))

    def _start_manager(self) -> None:
        limits = limits_of(self.settings, self.scheduler_info)

        async def make() -> TokenizerManager:
            self._receiver: AsyncReceiver[ToTokenizer] = AsyncReceiver(
                self.zmq, self.ports.inbox("tokenizer"), ToTokenizer, bind=True
            )
            if self.settings.serve.tokenizer_worker_num > 1:
                on_failure = partial(self._on_death, "tokenizer router")
                self.router = MultiTokenizerRouter(
                    self.zmq, self.ports, self._receiver, self._sender, on_failure
                )
                self.router.events_on = self.trace.on
            manager = TokenizerManager(
                codec=self.tokenizer,
                sender=self._sender,
                receiver=self.router or self._receiver,
                trace=self.trace,
                limits=limits,
                clock=self.trace.clock,
                weights=Weights(self.settings.model.model_path, self.settings.model.weight_version),
                on_failure=partial(self._on_death, "tokenizer_manager"),
                request_timeout=self.settings.http.request_timeout,
                request_log=self.request_log,
                crew=self.router,
                ranks=self._ranks,
            )
            manager.start()
            return manager

        self.manager = self.loop.call(make())
        self._exit.callback(self._end_manager)
        if not self._sender.wait_for_peer(CONNECT_TIMEOUT_MS):
            raise StartupError("the scheduler got ready but never connected to its socket")

    def _emit_started(self) -> None:
        if not self.trace.on:
            return
        for trace in (self.http_trace, self.trace):
            tell_started(trace, self.mode)
        self.trace.emit(configured_of(self.settings, self.scheduler_info))

    def _warm_up(self) -> None:
        """Events begin after it."""
        if self.settings.serve.skip_server_warmup:
            return
        recording, self.trace.on = self.trace.on, False

        async def begin() -> None:
            if recording:
                self.set_events(True)

        warm_up(self.manager, self.loop, self.ports.instance_id, begin)

    async def start_workers(self, listeners: Sequence[socket.socket], main_path: str) -> TokenizerWorkers:
        """Tokenizer workers that serve a port together; what they do not answer goes to the app at `main_path`.

        Raises:
            StartupError: one could not start; none is left.
        """
        assert self.router is not None
        workers = TokenizerWorkers(self.settings, self.router, self.tokenizer_dir, self.model_dir)
        self._exit.callback(self._end_processes, workers.children)
        self.infos |= await workers.start(listeners, main_path, self.scheduler_info, self._on_death)
        return workers

    def header(self, dropped: int = 0) -> Header:
        """Of a recording that begins after so many events."""
        configured = configured_of(self.settings, self.scheduler_info)
        return header_of(self.settings, self.infos.values(), configured, dropped)

    # ------------------------------------------------------------------ death

    def _on_death(self, component: str, how: str) -> None:
        """A component ended, or is given up. If nobody asked it to, every waiting request gets an error now."""
        if self._stopping or self.dead.is_set() or self._lose_rank(rank_of(component), how):
            return
        message = f"the {component} died ({how}); the engine cannot go on"
        log.critical("%s", message)
        # in this order: whoever sees `dead` finds the message, and a start that just ends sees `dead`
        self.status.message = message
        self.dead.set()
        self.status.state = ServerState.UNHEALTHY
        with contextlib.suppress(RuntimeError):  # the loop may have been stopped meanwhile
            self.loop.loop.call_soon_threadsafe(self._fail_all, message)

    def _lose_rank(self, rank: int | None, how: str) -> bool:
        """Of several schedulers one died: the others go on. Says whether there are others."""
        if rank is None:
            return False
        with self._ranks_lock:
            self._lost.add(rank)
            if len(self._lost) == self.settings.parallel.dp_size:
                return False
        log.error("data parallel rank %d died (%s); the other ranks go on", rank, how)
        with contextlib.suppress(RuntimeError):  # the loop may have been stopped meanwhile
            self.loop.loop.call_soon_threadsafe(self.manager.lose_rank, rank, how)
        return True

    def _fail_all(self, message: str) -> None:
        if self._dump is not None:
            self._dump.start(message, self.manager.live_requests())
        self.manager.refuse_new(message)
        self.manager.fail_all(message, 503)
        if self.router is not None:
            self.router.fail(message)

    # ------------------------------------------------------------------ stop

    def stop(
        self, grace: float | None = None, before_end: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Refuse new requests, let running ones finish for `grace` seconds, end everything, free everything.

        `before_end` runs in the engine's loop when the requests have drained: servers close their ports there.
        In a forked process there is nothing to end: what it sees belongs to the process that it came from.
        """
        if not self.loop.is_here:
            return
        with self._stop_lock:
            if self._stopped:
                return
            if self.status.state is ServerState.UP:
                self.status.state = ServerState.STOPPING
            wait = self.settings.serve.shutdown_grace if grace is None else grace
            if not self.dead.is_set():
                self._drain(wait)
            self._stopping = True
            if before_end is not None:
                with contextlib.suppress(TimeoutError):
                    self.loop.call(_awaited(before_end), timeout=CHILD_STOP_S)
            self._exit.close()
            self._stopped = True

    def _drain(self, grace: float) -> None:
        async def drain() -> None:
            self.manager.refuse_new(refusal := "the server is shutting down")
            self.manager.debug.release()
            self.manager.control.release()
            if self.router is not None:
                await self.router.drained(grace, refusal)
            if self.manager.rid_to_state and not await self.manager.drained(grace):
                if grace:
                    log.warning("requests did not finish in %.0f s; aborting them", grace)
                self.manager.abort_request(abort_all=True)
                if not await self.manager.drained(LAST_ABORTS_S):
                    self._patience = LAST_ABORTS_S  # they hear nothing; they will hardly leave by themselves

        try:
            self.loop.call(drain(), timeout=grace + 5.0)
        except TimeoutError:
            log.warning("the requests under way did not end in time; they are cut off")
        except Exception:  # whatever it is, the children must still be ended
            log.exception("letting the requests finish failed; they are cut off")

    def _end_manager(self) -> None:
        """Tell the children to leave; the scheduler passes it on to the detokenizer."""

        async def end() -> None:
            with contextlib.suppress(Unavailable):  # it is gone already
                self._sender.send(ShutdownReq())
            await self.manager.close()
            for trace in self._tracers:
                if trace.on:
                    trace.tell_cost()
            self._receiver.close()
            if self.router is not None:
                self.router.close()

        self.loop.call(end())

    def _end_processes(self, children: list[ChildProcess]) -> None:
        """Before the manager is up, or after a sibling died, nobody will tell them to leave: end them."""
        orderly = self.status.state is ServerState.STOPPING
        late = end_processes(children, self._patience if orderly else 0.0)
        self.forced += late if orderly else []

    def _end_children(self, children: Children) -> None:
        orderly = self.status.state is ServerState.STOPPING
        self.forced += children.end(self._patience, orderly=orderly, why=self.status.message)


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()


def _remove(folder: tempfile.TemporaryDirectory[str]) -> None:
    with contextlib.suppress(OSError):
        folder.cleanup()
