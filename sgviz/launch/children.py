"""The components behind the main process, started together and ended together, as threads or as processes.

Imports: launch, config, channel, data_parallel (the loads), messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Queue

from sgviz.channel import Sender
from sgviz.data_parallel.load_snapshots import SnapshotFile, SnapshotList
from sgviz.data_parallel.nodes import agreement
from sgviz.errors import StartupError, Unavailable
from sgviz.launch import processes, threads
from sgviz.launch.components import Context
from sgviz.launch.ending import end_processes, end_threads
from sgviz.launch.messages import BootMessage, InitInfo
from sgviz.launch.node_desk import NodeDesk
from sgviz.launch.processes import ChildProcess, OnDeath
from sgviz.launch.ranks import children_of, rank_of, share_of
from sgviz.launch.threads import ChildThread
from sgviz.messages import ShutdownReq
from sgviz.model.fetch import resolve_model

CHILD_STOP_S = 5.0  # for all of them together


class Children:
    """In `threads` or `processes`, whichever the context says.

    Args:
        context: of threads; processes get what of it can travel. to_first: to the scheduler, or to the controller
            before several.
    """

    def __init__(self, context: Context, to_first: Sender) -> None:
        self._context = context
        self._to_first = to_first
        self._ranks = context.settings.parallel.dp_size
        self._names = children_of(context.settings)
        self._processes: list[ChildProcess] = []
        self._threads: list[ChildThread] = []
        self._nodes: NodeDesk | None = None
        self._failed = ""  # why the start did

    @property
    def _all(self) -> Sequence[ChildProcess] | Sequence[ChildThread]:
        return self._threads or self._processes

    def start(self) -> dict[str, InitInfo]:
        """Start all and wait until they are ready; what each told, by component. Raises StartupError."""
        try:
            return self._start_threads() if self._context.mode == "threads" else self._start_processes()
        except StartupError as error:
            self._failed = error.message
            raise

    def _start_processes(self) -> dict[str, InitInfo]:
        context = self._context
        if self._ranks > 1:
            SnapshotFile.create(context.ports.loads_path, self._ranks).close()
        if context.ports.across is not None:
            agree = agreement(context.settings, resolve_model(context.settings.model.model_path))
            self._nodes = NodeDesk(context.zmq, context.settings, context.ports, agree)
        for component in self._names:
            settings = context.settings
            boot = BootMessage(
                component=component,
                settings=settings if rank_of(component) is None else share_of(settings, context.mode),
                ports=context.ports,
                tokenizer_dir=context.tokenizer_dir,
            )
            self._processes.append(ChildProcess(boot))
        infos = processes.wait_ready(self._processes, context.settings.serve.startup_timeout)
        return infos | (self._nodes.wait_ready(self._check_alive) if self._nodes else {})

    def _check_alive(self) -> None:
        """Raise StartupError if a process ended while others are waited for."""
        for child in self._processes:
            if child.returncode is not None:
                how = processes.describe_exit(child.returncode)
                raise StartupError(
                    f"the {child.component} process died while other nodes were starting ({how})"
                )

    def _start_threads(self) -> dict[str, InitInfo]:
        context = self._context
        if self._ranks > 1:
            context = replace(context, loads=SnapshotList(self._ranks))
        outcomes: threads.Outcomes = Queue()
        for component in self._names:
            self._threads.append(ChildThread(component, context, outcomes))
        return threads.wait_ready(self._threads, outcomes, context.settings.serve.startup_timeout)

    def watch(self, on_death: OnDeath) -> None:
        """Call `on_death(component, how)` from a thread when one ends, or is stuck."""
        for child in self._all:
            child.watch(on_death)
        if self._nodes is not None:
            self._nodes.watch(on_death)

    def end(self, patience: float, *, orderly: bool, why: str = "") -> list[str]:
        """Let all leave within `patience` seconds, and end who does not; says who that was.

        `orderly`: they were told to leave. Else (a failed start, a dead sibling) nobody will tell them.
        `why`: it is over for the other nodes, if that is known.
        """
        if self._context.mode == "threads":
            return self._end_threads(patience, orderly)
        late = end_processes(self._processes, patience if orderly else 0.0)
        if self._nodes is not None:
            self._nodes.close(None if orderly else why or self._failed or "its start was broken off")
        return late if orderly else []

    def _end_threads(self, patience: float, orderly: bool) -> list[str]:
        for child in self._threads:
            child.leave()
        if not orderly:
            self._tell_threads_to_leave()
        return end_threads(self._threads, patience)

    def _tell_threads_to_leave(self) -> None:
        """Threads cannot be killed, so each is told over its own socket; ranks hear it from the controller."""
        context = self._context
        with suppress(Unavailable):
            self._to_first.send(ShutdownReq())
        sender = Sender(context.zmq, context.ports.detokenizer_ipc_name)
        for _ in range(self._ranks):  # it leaves when every scheduler has
            sender.send(ShutdownReq())
        sender.close(int(CHILD_STOP_S * 1000))
