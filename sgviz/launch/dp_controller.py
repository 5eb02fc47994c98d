"""The data parallel controller as a component: its sockets, its watchdog, its end.

Imports: data_parallel, channel, launch.components.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from sgviz.channel import Receiver, Sender
from sgviz.data_parallel.controller import FOREVER_MS, DataParallelController
from sgviz.data_parallel.load_snapshots import SnapshotFile
from sgviz.data_parallel.policies import make_dispatch_policy
from sgviz.data_parallel.zmq_snapshots import SnapshotReceiver
from sgviz.errors import StartupError, Unavailable
from sgviz.events import WallClock
from sgviz.launch.components import CLOSE_LINGER_MS, Context, make_tracer, tell_started
from sgviz.launch.messages import InitInfo
from sgviz.launch.ranks import CONTROLLER
from sgviz.launch.watchdog import Progress, Watchdog
from sgviz.messages import ShutdownReq, ToController

CONNECT_TIMEOUT_MS = 10_000


def run_controller(context: Context, ready: Callable[[InitInfo], None]) -> None:
    """Bind a socket a rank, be ready, forward until a ShutdownReq. Whatever ends it, the ranks are told to leave."""
    ports, settings = context.ports, context.settings
    policy = make_dispatch_policy(
        settings.parallel.load_balance_method,
        is_prefill=settings.disaggregation.disaggregation_mode == "prefill",
    )
    trace, close_trace = make_tracer(CONTROLLER, context)
    loads = context.loads or SnapshotFile(ports.loads_path)
    from_afar = None
    if ports.across is not None and isinstance(loads, SnapshotFile):
        from_afar = SnapshotReceiver(context.zmq, ports.across.loads, loads, ports.across.ranks)
    inbox: Receiver[ToController] = Receiver(context.zmq, ports.scheduler_input_ipc_name, ToController)
    ranks = [
        Sender(context.zmq, ports.for_rank(rank).scheduler_input_ipc_name, bind=True)
        for rank in range(settings.parallel.dp_size)
    ]
    to_tokenizer = Sender(context.zmq, ports.tokenizer_ipc_name)
    to_detokenizer = Sender(context.zmq, ports.detokenizer_ipc_name)
    controller: DataParallelController | None = None
    try:
        controller = DataParallelController(
            inbox=inbox,
            ranks=ranks,
            to_tokenizer=to_tokenizer,
            to_detokenizer=to_detokenizer,
            policy=policy,
            loads=loads,
            trace=trace,
            one_process=context.mode == "threads",
        )
        tell_started(trace, context.mode)
        trace.on = trace.on and settings.serve.skip_server_warmup  # else events begin after the warm-up
        unix_ns, monotonic_ns = WallClock.anchor()
        ready(InitInfo(component=CONTROLLER, pid=os.getpid(), unix_ns=unix_ns, monotonic_ns=monotonic_ns))
        watchdog = Watchdog(
            CONTROLLER,
            lambda: Progress(controller.turn, controller.busy),
            settings.schedule.watchdog_timeout,
            context.give_up,
        )
        try:
            controller.take(_first_messages(inbox, ranks))
            controller.run()
        finally:
            watchdog.stop()
    finally:
        if controller is None or not controller.ended:  # each hears its end once, and passes it on once
            _end_ranks(ranks)
        if from_afar is not None:
            from_afar.close()
        inbox.close()
        for sender in (*ranks, to_tokenizer, to_detokenizer):
            sender.close(CLOSE_LINGER_MS)
        if trace.on:
            trace.tell_cost()
        close_trace()


def _first_messages(inbox: Receiver[ToController], ranks: list[Sender]) -> list[ToController]:
    """They come when all ranks are ready: from then on one without a connection is gone. Or the start has failed."""
    inbox.wait(FOREVER_MS)
    messages = inbox.drain()
    failed = any(isinstance(message, ShutdownReq) for message in messages)
    for rank, sender in enumerate(ranks):
        if not failed and not sender.wait_for_peer(CONNECT_TIMEOUT_MS):
            raise StartupError(f"data parallel rank {rank} never connected to the controller")
    return messages


def _end_ranks(ranks: list[Sender]) -> None:
    """The controller failed: of threads nobody else can tell them."""
    for sender in ranks:
        with suppress(Unavailable):
            sender.send(ShutdownReq())
