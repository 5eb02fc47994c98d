"""NodeTable: what node 0 knows of the other nodes. No sockets, no threads: messages and seconds in, answers out.

Imports: channel, config, data_parallel (nodes), launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import sgviz
from sgviz.config.parallel_groups import ParallelConfig
from sgviz.data_parallel.nodes import Value, disagreement
from sgviz.launch.messages import InitInfo
from sgviz.launch.node_messages import (
    AskClock,
    ComponentDied,
    Join,
    Leaving,
    NodeReady,
    Refused,
    TellClock,
    ToNode,
    ToNodeZero,
    Welcome,
)
from sgviz.launch.ranks import SCHEDULER


@dataclass(slots=True, eq=False)
class _Node:
    """`heard`: when it last gave a sign. `lost`: why it is no longer counted on."""

    number: int
    identity: bytes
    heard: float
    infos: dict[str, InitInfo] | None = None
    dead: set[str] = field(default_factory=set)  # components; membership only
    lost: str | None = None


class NodeTable:
    """Safe for one thread at a time.

    Args:
        agree: the settings of node 0 that must be those of all. welcome: what a node that fits is told.
        now_ns: the clock that recordings are on.

    Attributes:
        failure: why the start cannot go on; None if it can.
        deaths: `(component, how)` of ranks that were lost after their node was ready; whoever reads takes them out.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        agree: dict[str, Value],
        welcome: Welcome,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._parallel, self._agree, self._welcome, self._now_ns = parallel, agree, welcome, now_ns
        self._nodes: dict[int, _Node] = {}
        self._limit = parallel.node_heartbeat_timeout
        self.failure: str | None = None
        self.deaths: list[tuple[str, str]] = []

    @property
    def infos(self) -> dict[str, InitInfo] | None:
        """What all schedulers of all other nodes told when they were ready; None if one is not yet."""
        out: dict[str, InitInfo] = {}
        for number in range(1, self._parallel.nnodes):
            node = self._nodes.get(number)
            if node is None or node.infos is None:
                return None
            out |= node.infos
        return out

    @property
    def live(self) -> list[bytes]:
        """The identities of nodes that joined and are not lost."""
        return [node.identity for node in self._nodes.values() if node.lost is None]

    def missing(self) -> list[int]:
        """The nodes that never joined."""
        return [number for number in range(1, self._parallel.nnodes) if number not in self._nodes]

    def unready(self) -> list[int]:
        """The nodes whose schedulers are not ready."""
        numbers = range(1, self._parallel.nnodes)
        return [n for n in numbers if n not in self._nodes or self._nodes[n].infos is None]

    def take(self, identity: bytes, message: ToNodeZero, now: float) -> ToNode | None:
        """What that peer is answered, if anything. `now`: in seconds."""
        if isinstance(message, Join):
            return self._join(identity, message, now)
        node = next((node for node in self._nodes.values() if node.identity == identity), None)
        if node is None:
            return Refused(why="it was started anew and does not know the node")
        if node.lost is not None:
            return Refused(why=f"it gave the node up, as {node.lost}")
        node.heard = now
        if isinstance(message, AskClock):
            return TellClock(sent_ns=message.sent_ns, now_ns=self._now_ns())
        if isinstance(message, NodeReady):
            node.infos = {info.component: info for info in message.infos}
        elif isinstance(message, ComponentDied):
            self._died(node, message.component, message.how)
        elif isinstance(message, Leaving):
            self._lose(node, f"node {node.number} ended: {message.why}")
        return None

    def look(self, now: float) -> None:
        """Lose the nodes that have been silent for too long at `now`."""
        for node in self._nodes.values():
            if node.lost is None and now - node.heard > self._limit:
                self._lose(node, f"node {node.number} gave no sign of life for {self._limit:g} s")

    def _join(self, identity: bytes, message: Join, now: float) -> ToNode:
        known = self._nodes.get(message.node_rank)
        if known is not None and known.identity == identity and known.lost is None:
            return self._welcome  # the answer to its first try was still on its way
        why = self._unfit(message)
        if why:
            if self.infos is None and self.failure is None:
                self.failure = f"node {message.node_rank} does not fit: {why}"
            return Refused(why=why)
        if known is not None:
            how = known.lost or f"node {known.number} has joined, and lives"
            return Refused(why=f"{how}; a node joins once, when the whole engine starts")
        self._nodes[message.node_rank] = _Node(message.node_rank, identity, now)
        return self._welcome

    def _unfit(self, message: Join) -> str:
        """Why the node cannot be one of this engine; empty if it can."""
        if message.version != sgviz.__version__:
            return f"it has sgviz {message.version}, node 0 has {sgviz.__version__}"
        if differs := disagreement(self._agree, message.agree):
            return f"it has {differs}"
        if not 1 <= message.node_rank < self._parallel.nnodes:
            return f"its node_rank is {message.node_rank}, and others are 1 to {self._parallel.nnodes - 1}"
        return ""

    def _died(self, node: _Node, component: str, how: str) -> None:
        if node.infos is None:
            self.failure = self.failure or f"node {node.number}: the {component} died ({how})"
        elif component in node.infos and component not in node.dead:
            node.dead.add(component)
            self.deaths.append((component, how))

    def _lose(self, node: _Node, why: str) -> None:
        node.lost = why
        if node.infos is None:
            self.failure = self.failure or why
            return
        for rank in self._parallel.ranks_of(node.number):
            self._died(node, f"{SCHEDULER}-{rank}", why)
