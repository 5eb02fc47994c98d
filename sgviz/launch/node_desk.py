"""NodeDesk: node 0's end of what the nodes of an engine say to each other; a thread at the address where they meet.

Mirrors what SGLang leaves to torch's rendezvous. Imports: config, data_parallel (nodes), launch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from sgviz.channel import PortArgs, bind_tcp
from sgviz.config import Settings
from sgviz.data_parallel.nodes import Value, meeting_address
from sgviz.errors import StartupError
from sgviz.launch.lived import Lived
from sgviz.launch.messages import InitInfo
from sgviz.launch.node_messages import BEATS, Beat, Bye, ToNode, ToNodeZero, Welcome
from sgviz.launch.node_table import NodeTable
from sgviz.launch.processes import OnDeath

log = logging.getLogger(__name__)

POLL_MS = 100
LAST_WORDS_MS = 1000


class NodeDesk:
    """Welcomes nodes from construction to `close`, and notices when one is lost. `ports.across` is given."""

    def __init__(
        self, context: zmq.Context[Any], settings: Settings, ports: PortArgs, agree: dict[str, Value]
    ) -> None:
        assert ports.across is not None
        self._parallel = settings.parallel
        self._startup_timeout = settings.serve.startup_timeout
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        address = meeting_address(self._parallel)
        bind_tcp(self._socket, address)
        welcome = Welcome(instance_id=ports.instance_id, addresses=ports.across)
        self._table = NodeTable(self._parallel, agree, welcome)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToNodeZero).decode
        self._lock = threading.Lock()  # of the table and of who is told of deaths
        self._on_death: OnDeath | None = None
        self._last: Bye | None = None
        self._opened = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sgviz-nodes", daemon=True)
        self._thread.start()
        log.info("waiting for %d other nodes at %s", self._parallel.nnodes - 1, address)

    # ------------------------------------------------------------------ for the pipeline

    def wait_ready(self, check: Callable[[], None]) -> dict[str, InitInfo]:
        """What the schedulers of all other nodes told. `check` raises when there is no use in waiting.

        Raises:
            StartupError: a node does not fit, failed, or did not come in time.
        """
        join_until = self._opened + self._parallel.node_timeout
        ready_until = max(self._opened, time.monotonic()) + self._startup_timeout
        while True:
            with self._lock:
                infos, failure = self._table.infos, self._table.failure
                missing, unready = self._table.missing(), self._table.unready()
            if failure is not None:
                raise StartupError(failure)
            if infos is not None:
                return infos
            check()
            now = time.monotonic()
            if missing and now > join_until:
                raise StartupError(
                    f"{_named(missing)} did not join at {self._parallel.dist_init_addr} within "
                    f"{self._parallel.node_timeout:g} s (node_timeout)"
                )
            if not missing and now > max(ready_until, join_until):
                raise StartupError(f"{_named(unready)} did not get ready within {self._startup_timeout:g} s")
            time.sleep(POLL_MS / 1000)

    def watch(self, on_death: OnDeath) -> None:
        """Call `on_death(component, how)` from the desk's thread for each rank of a lost node."""
        with self._lock:
            self._on_death = on_death

    def close(self, why: str | None) -> None:
        """Tell the nodes that node 0 ends; `why`: None after an orderly stop."""
        self._last = Bye(why=why)
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
            if self._last is not None:
                self._tell_all(self._last)
        finally:
            self._socket.close(linger=LAST_WORDS_MS)

    def _serve(self) -> None:
        pause = self._parallel.node_heartbeat_timeout / BEATS
        lived, beat_at = Lived(), 0.0
        while self._last is None:
            if self._socket.poll(min(POLL_MS, int(pause * 500))):
                self._drain(lived.now())
            now = lived.now()
            with self._lock:
                self._table.look(now)
            if now >= beat_at:
                beat_at = now + pause
                self._tell_all(Beat())
            self._tell_deaths()

    def _drain(self, now: float) -> None:
        while self._socket.poll(0):
            identity, *body = self._socket.recv_multipart()
            try:
                message = self._decode(body[0] if body else b"")
            except msgspec.DecodeError:
                log.warning("%d bytes at dist_init_addr are of no node", sum(map(len, body)))
                continue
            with self._lock:
                answer = self._table.take(identity, message, now)
            if answer is not None:
                self._send(identity, answer)

    def _tell_all(self, message: ToNode) -> None:
        with self._lock:
            live = self._table.live
        for identity in live:
            self._send(identity, message)

    def _send(self, identity: bytes, message: ToNode) -> None:
        self._socket.send_multipart((identity, self._encode(message)))  # to who is gone, it goes nowhere

    def _tell_deaths(self) -> None:
        with self._lock:
            if self._on_death is None or not self._table.deaths:
                return
            deaths, self._table.deaths = self._table.deaths, []
        for component, how in deaths:
            self._on_death(component, how)


def _named(nodes: list[int]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"
