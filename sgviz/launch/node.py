"""Node: what runs on a host that is not the first: the schedulers of its ranks, a link to node 0, a health stub.

Mirrors SGLang's `launch_server` with `node_rank` above 0. What differs: a node that loses node 0 ends itself, with all
it started, and one that is lost does not come back before the engine starts again. Imports: launch, model (fetch).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import zmq

from sgviz.config import Settings
from sgviz.data_parallel.nodes import agreement
from sgviz.errors import SgvizError, StartupError
from sgviz.launch.children import CHILD_STOP_S
from sgviz.launch.ending import end_processes
from sgviz.launch.messages import BootMessage
from sgviz.launch.node_link import NodeLink
from sgviz.launch.node_messages import ComponentDied, NodeReady, Welcome
from sgviz.launch.node_stub import HealthStub
from sgviz.launch.processes import ChildProcess, wait_ready
from sgviz.launch.ranks import check_policies, local_schedulers_of, share_of
from sgviz.model.fetch import resolve_model

log = logging.getLogger(__name__)


class Node:
    """Started and ready, or not at all.

    Attributes:
        ended: set when there is nothing left to do: node 0 stopped or is lost, or all schedulers died.
        why: if that was not in order. url: of the health stub.

    Raises:
        StartupError: node 0 is not there or refuses, or a scheduler cannot start. Nothing is left behind.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ended = threading.Event()
        self.why: str | None = None
        self.forced: list[str] = []
        self._children: list[ChildProcess] = []
        self._lock = threading.Lock()  # of who is alive, and of the first why
        self._alive = set(local_schedulers_of(settings))
        self._stopped = False  # node 0 said that it is over, in order
        self._exit = contextlib.ExitStack()  # undoes the start, last first
        try:
            self._start()
        except BaseException as error:
            self._end(self.why or (error.message if isinstance(error, SgvizError) else type(error).__name__))
            if isinstance(error, StartupError) and self.why is not None:
                raise StartupError(self.why) from None  # what ended the children, rather than that they ended
            raise

    def _start(self) -> None:
        check_policies(self.settings)
        model_dir = resolve_model(self.settings.model.model_path)
        stub = HealthStub(self.settings)
        self.url = stub.url
        self._exit.callback(stub.close)
        context: zmq.Context[Any] = zmq.Context()
        self._exit.callback(context.term)
        self._link = NodeLink(context, self.settings, agreement(self.settings, model_dir))
        self._exit.callback(self._close_link)
        stub.why_not = "it has not joined node 0"
        welcome = self._link.join()
        shift_ns = self._link.clock_shift_ns()
        log.info("joined node 0, whose clock is %.3f ms ahead", shift_ns / 1e6)
        stub.why_not = "its schedulers are starting"
        self._start_children(welcome, shift_ns)
        self._stub = stub
        stub.why_not = None

    def _start_children(self, welcome: Welcome, shift_ns: int) -> None:
        tokenizer = self.settings.model.tokenizer_path or self.settings.model.model_path
        tokenizer_dir = str(resolve_model(tokenizer))
        self._exit.callback(self._end_children)
        for component in sorted(self._alive):
            boot = BootMessage(
                component=component,
                settings=share_of(self.settings, "processes"),
                ports=welcome.addresses.as_ports(welcome.instance_id),
                tokenizer_dir=tokenizer_dir,
                clock_shift_ns=shift_ns,
            )
            self._children.append(ChildProcess(boot))
        self._link.start(self._on_end)
        infos = wait_ready(self._children, self.settings.serve.startup_timeout)
        for child in self._children:
            child.watch(self._on_death)
        self._link.tell(NodeReady(infos=list(infos.values())))

    # ------------------------------------------------------------------ ends

    def _on_end(self, why: str | None) -> None:
        """Node 0 is over, or cannot be heard: so is this node. From the link's thread."""
        with self._lock:
            self._stopped = why is None
            self.why = self.why or why
        if why is not None:
            log.error("%s; this node ends", why)
            for child in self._children:  # a start that waits for them ends too
                child.terminate()
        self.ended.set()

    def _on_death(self, component: str, how: str) -> None:
        """A scheduler ended: told to leave, killed, or by a fault."""
        child = next(child for child in self._children if child.component == component)
        orderly = child.returncode == 0
        with self._lock:
            self._alive.discard(component)
            last = not self._alive
        if orderly or self.ended.is_set():
            return  # node 0 told it to, and is about to tell the node
        log.error("the %s died (%s)", component, how)
        self._link.tell(ComponentDied(component=component, how=how))
        if last:
            self.why = self.why or f"the {component} died ({how}); no scheduler of this node is left"
            self.ended.set()

    def close(self) -> None:
        """End the schedulers and leave; node 0 is told unless it told us. Idempotent."""
        self._end("it was stopped" if self.why is None else self.why)

    def _end(self, why: str) -> None:
        self._leaving = why
        self.ended.set()
        self._exit.close()

    def _end_children(self) -> None:
        patience = CHILD_STOP_S if self._stopped else 0.0
        late = end_processes(self._children, patience)
        self.forced += late if self._stopped else []

    def _close_link(self) -> None:
        self._link.close(self._leaving)
