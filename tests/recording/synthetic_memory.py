"""The memory of the synthetic pipeline: a page allocator and a prefix tree that tell what they do."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sgviz.events.schema import (
    AnyBody,
    PoolReturned,
    PoolTaken,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)


def raw(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


@dataclass(eq=False)
class Node:
    id: int
    parent: Node | None
    ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    lock: int = 0
    used: int = 0


@dataclass(eq=False)
class Request:
    rid: str
    ids: list[int]
    max_new: int
    stream: bool
    arrive_ns: int
    out: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # of positions [0, allocated)
    protected: int = 0
    node: Node | None = None
    cached: int | None = None
    chunks: int = 0

    @property
    def fill(self) -> list[int]:
        return self.ids + self.out


class Memory:
    """`total` tokens in pages of `page`; every change goes to `emit`."""

    def __init__(self, total: int, page: int, emit: Callable[[AnyBody], None]) -> None:
        self.page, self.total, self.emit = page, total // page * page, emit
        self.free_pages = list(range(self.total // page, 0, -1))
        self.root = Node(0, None, lock=1)
        self.evictable = self.protected = 0
        self.node_ids = self.steps = 0

    @property
    def free(self) -> int:
        return len(self.free_pages) * self.page

    def take(self, requests: list[Request], counts: list[int]) -> None:
        taken: list[int] = []
        for request, count in zip(requests, counts):
            for _ in range(count):
                if len(request.slots) % self.page == 0:
                    slot = self.free_pages.pop() * self.page
                else:
                    slot = request.slots[-1] + 1
                request.slots.append(slot)
                taken.append(slot)
        rids = tuple(request.rid for request in requests)
        self.emit(PoolTaken(rids=rids, counts=tuple(counts), slots=raw(taken), free=self.free))

    def give(self, rid: str, slots: list[int], why: str) -> None:
        if not slots:
            return
        self.free_pages += sorted({slot // self.page for slot in slots}, reverse=True)
        self.emit(PoolReturned(rid=rid, slots=raw(slots), why=why, free=self.free))

    def match(self, ids: list[int]) -> tuple[list[int], Node]:
        self.steps += 1
        node, slots, at = self.root, list[int](), 0
        while len(ids) - at >= self.page:
            child = node.children.get(tuple(ids[at : at + self.page]))
            if child is None:
                break
            child.used = self.steps
            same = 0
            while same < len(child.ids) and at + same < len(ids) and child.ids[same] == ids[at + same]:
                same += 1
            same -= same % self.page
            if same < len(child.ids):
                child = self.split(child, same)
            node, slots, at = child, slots + child.slots, at + len(child.ids)
        return slots, node

    def split(self, node: Node, at: int) -> Node:
        self.node_ids += 1
        assert node.parent is not None
        upper = Node(
            self.node_ids, node.parent, node.ids[:at], node.slots[:at], lock=node.lock, used=self.steps
        )
        node.parent.children[tuple(upper.ids[: self.page])] = upper
        node.parent, node.ids, node.slots = upper, node.ids[at:], node.slots[at:]
        upper.children[tuple(node.ids[: self.page])] = node
        self.emit(TreeSplit(node=node.id, upper=upper.id, at=at))
        return upper

    def lock(self, rid: str, node: Node, delta: int) -> None:
        moved, at = 0, node
        while at.parent is not None:
            if (at.lock == 0 and delta == 1) or (at.lock == 1 and delta == -1):
                moved += len(at.ids)
            at.lock += delta
            at = at.parent
        self.protected += moved * delta
        self.evictable -= moved * delta
        self.emit(TreeLocked(rid=rid, node=node.id, delta=delta, tokens=moved))

    def insert(self, request: Request, length: int) -> None:
        """Put the first `length` positions (whole pages) in the tree; frees duplicates."""
        length -= length % self.page
        ids = request.fill[:length]
        present, node = self.match(ids)
        if len(present) < length:
            self.node_ids += 1
            new = Node(
                self.node_ids,
                node,
                ids[len(present) :],
                request.slots[len(present) : length],
                used=self.steps,
            )
            node.children[tuple(new.ids[: self.page])] = new
            self.evictable += len(new.ids)
            self.emit(
                TreeInserted(
                    rid=request.rid,
                    node=new.id,
                    parent=node.id,
                    slots=raw(new.slots),
                    present=len(present),
                    token_ids=raw(new.ids),
                )
            )
            node = new
        if request.protected < len(present):
            self.give(request.rid, request.slots[request.protected : len(present)], "duplicate")
        request.slots[: len(present)] = present
        self._relock(request, node)
        request.protected = length

    def _relock(self, request: Request, node: Node) -> None:
        self.lock(request.rid, node, +1)
        if request.node is not None:
            self.lock(request.rid, request.node, -1)
        request.node = node

    def evict(self, tokens: int) -> None:
        while self.free < tokens:
            leaves = [node for node in self._nodes(self.root) if not node.children and node.lock == 0]
            victim = min(leaves, key=lambda node: (node.used, node.id))
            assert victim.parent is not None
            del victim.parent.children[tuple(victim.ids[: self.page])]
            self.evictable -= len(victim.ids)
            body = TreeEvicted(node=victim.id, tokens=len(victim.ids), last_access=victim.used)
            self.emit(body)
            self.give("", victim.slots, "evict")

    def _nodes(self, node: Node) -> list[Node]:
        out = [node] if node.parent else []
        for child in node.children.values():
            out += self._nodes(child)
        return out

    def release(self, request: Request, why: str) -> None:
        """Give back private slots, unlock; with why `finish` the whole pages go to the tree first."""
        if why == "finish":
            self.insert(request, len(request.slots))
        self.give(request.rid, request.slots[request.protected :], "tail" if why == "finish" else why)
        if request.node is not None:
            self.lock(request.rid, request.node, -1)
        request.slots, request.protected, request.node = [], 0, None
