"""A moment of a run as one looks at it: queue, running requests, batches under way, pools, the radix tree.

Mirrors what SGLang's `/server_info` and cache metrics show of the present, for any past moment.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sgviz.events.schema import BatchPlanned
from sgviz.recording.engine_fold import EngineFold


@dataclass(frozen=True, slots=True)
class TreeNodeState:
    """A node of the radix tree: `tokens` of its own with their ids (int32 bytes), its place and its locks.

    `locks` is SGLang's lock_ref: how often requests hold it or a node below; `owners` are those requests.
    """

    node: int
    parent: int
    depth: int
    tokens: int
    token_ids: bytes
    locks: int
    owners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after `count` events. Times are monotonic ns; `t_ms` counts from the recording's first event.

    Attributes:
        waiting: the queue in its order. running: past the queue and not being cut. chunked: the rid whose
            prompt is being cut ("": none). in_flight: batches planned and not processed.
        private: KV tokens by rid that are not the tree's, largest first. rows: row of the pool by rid.
        free, evictable, protected, private_total, total: KV tokens. exact: no event before was lost.
        apart: by rid the queue beside the waiting one, on a prefill or decode server (bootstrap, prealloc, transfer,
            inflight).
        tree: nodes, parents before children. tree_exact: the same for the tree.
    """

    count: int
    t: int
    t_ms: float
    iteration: int
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    chunked: str
    in_flight: tuple[BatchPlanned, ...]
    idle: bool
    new_token_ratio: float
    free: int
    evictable: int
    protected: int
    private_total: int
    total: int
    private: dict[str, int]
    rows: dict[str, int]
    tree: tuple[TreeNodeState, ...]
    exact: bool
    tree_exact: bool
    apart: dict[str, str] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """Tokens that cannot be had: protected and private."""
        return self.protected + self.private_total

    def __repr__(self) -> str:
        return (
            f"<Moment {self.t_ms:.3f} ms, iteration {self.iteration}: {len(self.running)} running, "
            f"{len(self.waiting)} waiting, KV {self.used} used, {self.evictable} evictable, {self.free} free>"
        )


def moment(fold: EngineFold, count: int, t0: int) -> Moment:
    """What `fold` says, as values that no longer change."""
    ledger = fold.ledger
    return Moment(
        count=count,
        t=fold.t,
        t_ms=(fold.t - t0) / 1e6 if fold.t else 0.0,
        iteration=fold.iteration,
        waiting=tuple(fold.waiting),
        running=tuple(fold.running),
        chunked=fold.chunked,
        in_flight=tuple(fold.in_flight.values()),
        idle=fold.idle,
        new_token_ratio=fold.ratio,
        free=ledger.free,
        evictable=ledger.evictable,
        protected=ledger.protected,
        private_total=ledger.private_total,
        total=ledger.total,
        private=dict(ledger.holders()),
        rows=dict(fold.rows),
        tree=tuple(tree_nodes(fold)),
        exact=ledger.exact,
        tree_exact=ledger.tree_known,
        apart={rid: queue for rid, queue in fold.apart.items() if queue},
    )


def tree_nodes(fold: EngineFold) -> Iterator[TreeNodeState]:
    """The nodes with their locks, parents before children, in the order of their numbers among siblings."""
    nodes = fold.ledger.nodes
    children: dict[int, list[int]] = {}
    for number, node in nodes.items():
        children.setdefault(node.parent if node.parent in nodes else 0, []).append(number)
    locks, owners = _locks(fold)
    stack = [(number, 0) for number in sorted(children.get(0, ()), reverse=True)]
    while stack:
        number, depth = stack.pop()
        node = nodes[number]
        yield TreeNodeState(
            number, node.parent, depth, node.tokens, node.token_ids, locks.get(number, 0),
            tuple(owners.get(number, ())),
        )  # fmt: skip
        stack += [(child, depth + 1) for child in sorted(children.get(number, ()), reverse=True)]


def _locks(fold: EngineFold) -> tuple[dict[int, int], dict[int, dict[str, None]]]:
    """Locks and their owners by node: a request holds a node and all above it."""
    counts: dict[int, int] = {}
    owners: dict[int, dict[str, None]] = {}
    nodes = fold.ledger.nodes
    for (rid, number), held in fold.ledger.locks.items():
        at: int = number
        while at in nodes:
            counts[at] = counts.get(at, 0) + held
            owners.setdefault(at, {})[rid] = None
            at = nodes[at].parent
    return counts, owners
