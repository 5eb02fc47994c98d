"""The components behind the main process, as plain blocking functions: a thread or a process runs them.

Imports: data_parallel, scheduler, detokenizer_manager, worker (lazily, torch comes with it), channel, events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from sgviz.channel import EVENT_HWM, PortArgs, Receiver, Sender
from sgviz.config import Settings
from sgviz.data_parallel.load_snapshots import SnapshotFile, SnapshotList
from sgviz.data_parallel.rank_sender import RankSender
from sgviz.data_parallel.zmq_snapshots import SnapshotSender
from sgviz.detokenizer_manager import DetokenizerManager
from sgviz.events import BufferSink, HostClock, OtherHostClock, Sink, Tracer, WallClock, schema
from sgviz.grammar import GrammarCompiler, make_compiler
from sgviz.launch.kv_parts import open_kv
from sgviz.launch.messages import InitInfo, WorkerBoot
from sgviz.launch.ranks import CONTROLLER, DETOKENIZER, SCHEDULER, rank_of
from sgviz.launch.watchdog import Progress, Watchdog
from sgviz.messages import ToDetokenizer, ToScheduler
from sgviz.messages.flow import StartProfileReqInput
from sgviz.model.tokenizer import Tokenizer
from sgviz.reasoning import marks_of
from sgviz.scheduler.control import Profile
from sgviz.scheduler.gate import DebugHost, LocalPredicates
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.scheduler.scheduler import Scheduler
from sgviz.worker.other_clock import OtherClockWorker
from sgviz.worker.protocol import WorkerInfo

CLOSE_LINGER_MS = 500  # last messages get this long to leave


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a component is built from.

    Attributes:
        give_up: ends the component from another thread as far as that can be done, and tells the parent why.
        sink: where events go when the component shares the process; None: over the event socket.
        mode: threads or processes.
        predicates: Python breakpoints, where the debugger shares the process.
        worker: of a tokenizer worker, what else it needs.
        rank: of a scheduler among several, its number. loads: where these tell their loads, if they are threads.
        clock: that of node 0, on whichever host the component runs.
    """

    settings: Settings
    ports: PortArgs
    zmq: zmq.Context[Any]
    tokenizer_dir: str
    mode: str
    give_up: Callable[[str], None]
    sink: Sink | None = None
    policy: SchedulePolicy | None = None
    predicates: LocalPredicates | None = None
    worker: WorkerBoot | None = None
    rank: int | None = None
    loads: SnapshotList | None = None
    clock: HostClock = field(default_factory=WallClock)


def run_scheduler(context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Load the model, report ready, schedule until a ShutdownReq."""
    from sgviz.worker.factory import make_worker

    started = time.monotonic()
    settings, rank = context.settings, context.rank
    ports = context.ports if rank is None else context.ports.for_rank(rank)
    component = SCHEDULER if rank is None else f"{SCHEDULER}-{rank}"
    trace, close_trace = make_tracer(component, context)
    worker = make_worker(settings, rank or 0)
    if isinstance(context.clock, OtherHostClock):
        worker = OtherClockWorker(worker, context.clock.shift_ns)
    inbox: Receiver[ToScheduler] = Receiver(context.zmq, ports.scheduler_input_ipc_name, ToScheduler)
    to_tokenizer = Sender(context.zmq, ports.tokenizer_ipc_name)
    to_detokenizer = Sender(context.zmq, ports.detokenizer_ipc_name)
    loads = None if rank is None else context.loads or _open_loads(context, rank)
    kv = None
    try:
        kv = open_kv(settings, worker, context.zmq, trace, rank or 0)
        if kv is not None:
            inbox.wake_on(kv.wakes)
        tokenizer = Tokenizer.load(Path(context.tokenizer_dir))
        grammars = _grammars(settings, tokenizer, trace, worker.info)
        scheduler = Scheduler(
            settings,
            worker,
            inbox=inbox,
            to_tokenizer=to_tokenizer if rank is None else RankSender(to_tokenizer, rank),
            to_detokenizer=to_detokenizer if rank is None else RankSender(to_detokenizer, rank),
            decode=tokenizer.decode,
            trace=trace,
            grammars=grammars,
            policy=context.policy,
            debug=_debug_host(context),
            make_profile=partial(make_profile, rank=rank),
            put_load=None if loads is None else loads.put,
            dp_rank=rank or 0,
            kv_manager=kv,
        )
        tell_started(trace, context.mode, context.clock)
        trace.on = trace.on and settings.serve.skip_server_warmup  # else events begin after the warm-up
        ready(_scheduler_info(component, scheduler, time.monotonic() - started, context.clock))
        try:
            _run_watched(component, scheduler, context)
        finally:
            if grammars is not None:
                grammars.close()
    finally:
        if kv is not None:
            kv.close()
        worker.close()
        inbox.close()
        to_detokenizer.close(CLOSE_LINGER_MS)
        to_tokenizer.close(CLOSE_LINGER_MS)
        if loads is not None:
            loads.close()
        close_trace()


def _open_loads(context: Context, rank: int) -> SnapshotFile | SnapshotSender:
    """Where a rank that is a process tells its loads: beside the controller, or across to it."""
    across = context.ports.across
    if across is not None and rank in across.ranks:
        return SnapshotSender(context.zmq, across.loads)
    return SnapshotFile(context.ports.loads_path)


def _grammars(
    settings: Settings, tokenizer: Tokenizer, trace: Tracer, info: WorkerInfo
) -> GrammarCompiler | None:
    return make_compiler(
        settings.grammar,
        tokenizer,
        trace.clock,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        marks=marks_of(settings.serve.reasoning_parser),
    )


def _run_watched(component: str, scheduler: Scheduler, context: Context) -> None:
    limit = context.settings.schedule.watchdog_timeout
    watchdog = Watchdog(component, lambda: Progress(*scheduler.progress()), limit, context.give_up)
    try:
        scheduler.run()
    finally:
        watchdog.stop()


def run_detokenizer(context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Turn ids into text until a ShutdownReq."""
    ports = context.ports
    trace, close_trace = make_tracer(DETOKENIZER, context)
    inbox: Receiver[ToDetokenizer] = Receiver(
        context.zmq, ports.inbox("detokenizer"), ToDetokenizer, bind=True
    )
    outbox = Sender(context.zmq, ports.tokenizer_ipc_name)
    try:
        codec = Tokenizer.load(Path(context.tokenizer_dir))
        ranks = context.settings.parallel.dp_size
        manager = DetokenizerManager(codec, inbox, outbox, trace, trace.clock, ranks=ranks)
        tell_started(trace, context.mode)
        trace.on = trace.on and context.settings.serve.skip_server_warmup
        ready(_info(DETOKENIZER))
        for _ in manager.event_loop():
            pass  # it blocks in its own poll when idle
    finally:
        inbox.close()
        outbox.close(CLOSE_LINGER_MS)
        close_trace()


def run_component(component: str, context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Run the component of that name until it is told to leave."""
    rank = rank_of(component)
    if component == CONTROLLER:
        from sgviz.launch.dp_controller import run_controller  # which builds on this module

        run_controller(context, ready)
    elif component == DETOKENIZER:
        run_detokenizer(context, ready)
    else:
        run_scheduler(replace(context, rank=rank), ready)


def make_tracer(component: str, context: Context) -> tuple[Tracer, Callable[[], None]]:
    """A tracer into the shared sink or over the event socket, and what closes it."""
    if context.settings.observe.disable_events:
        return Tracer(component, None, context.clock), lambda: None
    if context.sink is not None:
        return Tracer(component, context.sink, context.clock), lambda: None
    sender = Sender(context.zmq, context.ports.events_ipc_name, hwm=EVENT_HWM)
    sink = BufferSink(sender.send_events)

    def close() -> None:
        sink.flush()
        sender.close(CLOSE_LINGER_MS)

    return Tracer(component, sink, context.clock), close


def tell_started(trace: Tracer, mode: str, clock: HostClock | None = None) -> None:
    """Say which process this is; `t` of later events becomes calendar time by it."""
    if trace.on:
        unix_ns, monotonic_ns = (clock or WallClock()).anchor()
        trace.emit(
            schema.ProcessStarted(
                component=trace.component,
                pid=os.getpid(),
                mode=mode,
                unix_ns=unix_ns,
                monotonic_ns=monotonic_ns,
            )
        )
        trace.flush()


def _debug_host(context: Context) -> DebugHost | None:
    """What the scheduler's gate needs, where a debugger may attach: in its own process always, else if so set."""
    if context.mode != "threads" and not context.settings.serve.enable_debugger:
        return None
    return DebugHost(clock=WallClock(), local=context.predicates)


def make_profile(message: StartProfileReqInput, rank: int | None = None) -> Profile:
    """Of the scheduler's process; ranks write a file each."""
    from sgviz.worker.profiler import Profiler  # torch comes with it

    return Profiler(
        output_dir=message.output_dir,
        num_steps=message.num_steps,
        activities=message.activities,
        with_stack=message.with_stack,
        record_shapes=message.record_shapes,
        profile_id=message.profile_id,
        rank=rank,
    )


def _info(component: str) -> InitInfo:
    unix_ns, monotonic_ns = WallClock.anchor()
    return InitInfo(component=component, pid=os.getpid(), unix_ns=unix_ns, monotonic_ns=monotonic_ns)


def _scheduler_info(component: str, scheduler: Scheduler, load_s: float, clock: HostClock) -> InitInfo:
    info, limits = scheduler.worker.info, scheduler.state.limits
    unix_ns, monotonic_ns = clock.anchor()
    return InitInfo(
        component=component,
        pid=os.getpid(),
        unix_ns=unix_ns,
        monotonic_ns=monotonic_ns,
        model=info.model,
        device=info.device,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        context_len=info.context_len,
        eos_token_ids=info.eos_token_ids,
        max_total_num_tokens=info.max_total_num_tokens,
        max_req_len=limits.max_req_len,
        max_req_input_len=limits.max_req_input_len,
        max_running_requests=limits.max_running_requests,
        embedding=info.embedding,
        is_generation=info.is_generation,
        load_s=load_s,
    )
