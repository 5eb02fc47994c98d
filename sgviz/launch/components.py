"""The two components behind the main process, as plain blocking functions: a thread or a process runs them.

Imports: scheduler, detokenizer_manager, worker (lazily, torch comes with it), channel, events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from sgviz.channel import EVENT_HWM, PortArgs, Receiver, Sender
from sgviz.config import Settings
from sgviz.detokenizer_manager import DetokenizerManager
from sgviz.events import BufferSink, Sink, Tracer, WallClock, schema
from sgviz.grammar import make_compiler
from sgviz.launch.messages import InitInfo, WorkerBoot
from sgviz.launch.watchdog import Progress, Watchdog
from sgviz.messages import ToDetokenizer, ToScheduler
from sgviz.messages.flow import StartProfileReqInput
from sgviz.model.tokenizer import Tokenizer
from sgviz.reasoning import marks_of
from sgviz.scheduler.control import Profile
from sgviz.scheduler.gate import DebugHost, LocalPredicates
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.scheduler.scheduler import Scheduler

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


def run_scheduler(context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Load the model, report ready, schedule until a ShutdownReq."""
    from sgviz.worker.factory import make_worker

    started = time.monotonic()
    ports, settings = context.ports, context.settings
    trace, close_trace = make_tracer("scheduler", context)
    worker = make_worker(settings)
    inbox: Receiver[ToScheduler] = Receiver(context.zmq, ports.scheduler_input_ipc_name, ToScheduler)
    to_tokenizer = Sender(context.zmq, ports.tokenizer_ipc_name)
    to_detokenizer = Sender(context.zmq, ports.detokenizer_ipc_name)
    try:
        tokenizer = Tokenizer.load(Path(context.tokenizer_dir))
        grammars = make_compiler(
            settings.grammar,
            tokenizer,
            trace.clock,
            vocab_size=worker.info.vocab_size,
            eos_token_ids=worker.info.eos_token_ids,
            marks=marks_of(settings.serve.reasoning_parser),
        )
        scheduler = Scheduler(
            settings,
            worker,
            inbox=inbox,
            to_tokenizer=to_tokenizer,
            to_detokenizer=to_detokenizer,
            decode=tokenizer.decode,
            trace=trace,
            grammars=grammars,
            policy=context.policy,
            debug=_debug_host(context),
            make_profile=make_profile,
        )
        tell_started(trace, context.mode)
        trace.on = trace.on and settings.serve.skip_server_warmup  # else events begin after the warm-up
        ready(_scheduler_info(scheduler, time.monotonic() - started))
        watchdog = Watchdog(
            "scheduler",
            lambda: Progress(*scheduler.progress()),
            settings.schedule.watchdog_timeout,
            context.give_up,
        )
        try:
            scheduler.run()
        finally:
            watchdog.stop()
            if grammars is not None:
                grammars.close()
    finally:
        worker.close()
        inbox.close()
        to_detokenizer.close(CLOSE_LINGER_MS)
        to_tokenizer.close(CLOSE_LINGER_MS)
        close_trace()


def run_detokenizer(context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Turn ids into text until a ShutdownReq."""
    ports = context.ports
    trace, close_trace = make_tracer("detokenizer", context)
    inbox: Receiver[ToDetokenizer] = Receiver(
        context.zmq, ports.detokenizer_ipc_name, ToDetokenizer, bind=True
    )
    outbox = Sender(context.zmq, ports.tokenizer_ipc_name)
    try:
        codec = Tokenizer.load(Path(context.tokenizer_dir))
        manager = DetokenizerManager(codec, inbox, outbox, trace, trace.clock)
        tell_started(trace, context.mode)
        trace.on = trace.on and context.settings.serve.skip_server_warmup
        ready(_info("detokenizer"))
        for _ in manager.event_loop():
            pass  # it blocks in its own poll when idle
    finally:
        inbox.close()
        outbox.close(CLOSE_LINGER_MS)
        close_trace()


COMPONENTS: dict[str, Callable[[Context, Callable[[InitInfo], None]], None]] = {
    "scheduler": run_scheduler,
    "detokenizer": run_detokenizer,
}


def make_tracer(component: str, context: Context) -> tuple[Tracer, Callable[[], None]]:
    """A tracer into the shared sink or over the event socket, and what closes it."""
    if context.settings.observe.disable_events:
        return Tracer(component, None), lambda: None
    if context.sink is not None:
        return Tracer(component, context.sink), lambda: None
    sender = Sender(context.zmq, context.ports.events_ipc_name, hwm=EVENT_HWM)
    sink = BufferSink(sender.send_events)

    def close() -> None:
        sink.flush()
        sender.close(CLOSE_LINGER_MS)

    return Tracer(component, sink), close


def tell_started(trace: Tracer, mode: str) -> None:
    """Say which process this is; `t` of later events becomes calendar time by it."""
    if trace.on:
        unix_ns, monotonic_ns = WallClock.anchor()
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


def make_profile(message: StartProfileReqInput) -> Profile:
    from sgviz.worker.profiler import Profiler  # torch comes with it

    return Profiler(
        output_dir=message.output_dir,
        num_steps=message.num_steps,
        activities=message.activities,
        with_stack=message.with_stack,
        record_shapes=message.record_shapes,
        profile_id=message.profile_id,
    )


def _info(component: str) -> InitInfo:
    unix_ns, monotonic_ns = WallClock.anchor()
    return InitInfo(component=component, pid=os.getpid(), unix_ns=unix_ns, monotonic_ns=monotonic_ns)


def _scheduler_info(scheduler: Scheduler, load_s: float) -> InitInfo:
    info, limits = scheduler.worker.info, scheduler.state.limits
    unix_ns, monotonic_ns = WallClock.anchor()
    return InitInfo(
        component="scheduler",
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
