"""The radix tree and its latest steps. Imports: events, recording, numpy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sgviz.events.schema import (
    CacheFlushed,
    Event,
    PrefixMatched,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)
from sgviz.recording.moment import Moment, TreeNodeState
from sgviz.viz.views.models import NodeText, TreeNode, TreeStep, TreeView

STEPS = 400
STEPS_SHOWN = 60
MAX_NODES = 400
MAX_IDS = 64
SLOT_BYTES = 4

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class TreeLog:
    """The latest steps of the tree, and when each node was used last (monotonic ns)."""

    steps: deque[tuple[int, TreeStep]] = field(default_factory=lambda: deque(maxlen=STEPS))
    used: dict[int, int] = field(default_factory=dict)
    t0: int = 0

    def apply(self, event: Event, count: int) -> None:
        """Note event number `count` if it is a step of the tree."""
        self.t0 = self.t0 or event.t
        match event.body:
            case PrefixMatched(rid=rid, tokens=tokens, node=node) if tokens:
                self._note(event, count, "match", node, 0, tokens, rid)
            case TreeSplit(node=node, upper=upper, at=at):
                self._note(event, count, "split", upper, node, at, "")
            case TreeInserted(rid=rid, node=node, parent=parent, slots=slots):
                self._note(event, count, "insert", node, parent, len(slots) // SLOT_BYTES, rid)
            case TreeLocked(rid=rid, node=node, delta=delta, tokens=tokens):
                self._note(event, count, "lock" if delta > 0 else "unlock", node, 0, tokens, rid)
            case TreeEvicted(node=node, tokens=tokens):
                self._note(event, count, "evict", node, 0, tokens, "")
                self.used.pop(node, None)
            case CacheFlushed(ok=True):
                self.used.clear()

    def _note(
        self, event: Event, count: int, what: str, node: int, other: int, tokens: int, rid: str
    ) -> None:
        t_ms = (event.t - self.t0) / 1e6
        step = TreeStep(seq=count, t_ms=t_ms, what=what, node=node, other=other, tokens=tokens, rid=rid)
        self.steps.append((event.t, step))
        self.used[node] = event.t


def tree_view(now: Moment, log: TreeLog, node: int, t0: int, decode: Decode | None) -> TreeView:
    """The tree at a moment; a large one without its deepest nodes."""
    nodes = sorted(now.tree, key=lambda each: each.depth)[:MAX_NODES]
    kept = {each.node for each in nodes}
    ordered = [each for each in now.tree if each.node in kept]
    steps = [step for _, step in log.steps if step.seq <= now.count]
    chosen = next((each for each in now.tree if each.node == node), None)
    return TreeView(
        seq=now.count, t_ms=now.t_ms, nodes=tuple(_node(each, log, t0) for each in ordered),
        steps=tuple(steps[-STEPS_SHOWN:]), chosen=_text(chosen, decode) if chosen is not None else None,
        hidden=len(now.tree) - len(nodes), exact=now.tree_exact,
    )  # fmt: skip


def _node(node: TreeNodeState, log: TreeLog, t0: int) -> TreeNode:
    used = log.used.get(node.node)
    return TreeNode(
        node=node.node, parent=node.parent, depth=node.depth, tokens=node.tokens, locks=node.locks,
        owners=node.owners[:8], used_ms=(used - t0) / 1e6 if used is not None else -1.0,
    )  # fmt: skip


def _text(node: TreeNodeState, decode: Decode | None) -> NodeText:
    ids = np.frombuffer(node.token_ids, dtype="<i4")[:MAX_IDS].tolist()
    text = decode(ids) if decode is not None else ""
    return NodeText(node=node.node, ids=tuple(ids), of=node.tokens, text=text)
