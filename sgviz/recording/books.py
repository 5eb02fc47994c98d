"""The accounts of the audit: who owns each slot, row and lock, and which rule an event breaks.

Imports: events, recording (ends, engine_fold, router_books, transfer_books), numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgviz.events.schema import (
    CacheFlushed,
    DisaggQueued,
    DpRankChanged,
    EngineConfigured,
    Event,
    LimitsChanged,
    LoopIdle,
    OutputStreamed,
    PoolReturned,
    PoolTaken,
    QueueEntered,
    RequestAborted,
    RequestDispatched,
    RequestFinished,
    RequestTokenized,
    RowReturned,
    RowTaken,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)
from sgviz.recording.ends import Ends
from sgviz.recording.engine_fold import ENDS_AT_ONCE
from sgviz.recording.router_books import RouterBooks
from sgviz.recording.transfer_books import TransferBooks

Slots = npt.NDArray[np.int64]
FREE, LEAVING, GONE = "", "(leaving the tree)", "(taken out of the pool)"
MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """The event `kind`, number `seq` of `component` at `t` (monotonic ns), breaks `rule`."""

    t: int
    component: str
    seq: int
    kind: str
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail} ({self.kind}, {self.component} #{self.seq})"


@dataclass(slots=True)
class _Node:
    parent: int
    slots: Slots
    locks: int = 0
    children: int = 0


class Books:
    """The accounts. An owner is a rid, the number of a node, nobody, or a node that was just dropped."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.page = 1
        self.size = 0  # of the pool as it was made; `total` may have become smaller
        self.total = 0
        self.free = 0
        self.sized = False
        self.owner: npt.NDArray[np.object_] = np.empty(0, dtype=object)
        self.nodes: dict[int, _Node] = {}
        self.locks: dict[tuple[str, int], int] = {}
        self.rows: dict[int, str] = {}
        self.live: dict[str, None] = {}
        self.aborting: dict[str, None] = {}
        self.ends = Ends()
        self.transfers = TransferBooks(self.fault)
        self.router = RouterBooks(self.fault)
        self.paired: dict[str, None] = {}  # of a prefill or decode server: a copy may outlive them
        self.draining: dict[str, None] = {}  # such ones that have ended; at the next idle they hold nothing
        self.event: Event | None = None
        self.gone = False  # the scheduler was lost, and none has come in its place
        self._sizes: EngineConfigured | None = None

    def fault(self, rule: str, detail: str) -> None:
        event = self.event
        if event is not None and len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(event.t, event.component, event.seq, event.kind, rule, detail))

    def configure(self, body: EngineConfigured) -> None:
        self._sizes = body
        self.page, self.total, self.free = (
            max(1, body.page_size),
            body.max_total_num_tokens,
            body.max_total_num_tokens,
        )
        self.size = self.total
        self.owner = np.full(self.total + 2 * self.page, FREE, dtype=object)
        self.nodes, self.locks, self.rows, self.sized = {}, {}, {}, True

    def rank_changed(self, body: DpRankChanged) -> None:
        """What a lost scheduler had is nobody's any more, and its requests end with it; a new one has nothing."""
        self.gone = not body.active
        self.live, self.aborting, self.locks, self.rows, self.nodes = {}, {}, {}, {}, {}
        if self._sizes is not None:
            self.configure(self._sizes)

    # ------------------------------------------------------------ slots

    def slots(self, raw: bytes) -> Slots:
        found, size = np.frombuffer(raw, dtype="<i4").astype(np.int64), self.size
        if len(found) and (found.min() < self.page or found.max() >= size + self.page):
            self.fault("slots are of the pool", f"slot {int(found.min())} to {int(found.max())} of {size}")
            found = found[(found >= self.page) & (found < size + self.page)]
        return found

    def move(self, slots: Slots, before: object, after: object, rule: str) -> None:
        """The slots change hands; whoever else has one breaks the rule."""
        owners = self.owner[slots]
        wrong = _are_not(owners, before)
        if wrong.any():
            at = int(wrong.argmax())
            self.fault(rule, f"slot {int(slots[at])} is held by {_who(owners[at])}, not by {_who(before)}")
        self.owner[slots] = after

    def pages(self, slots: Slots) -> int:
        return len(slots) if self.page == 1 else len(np.unique(slots // self.page)) * self.page

    def taken(self, body: PoolTaken) -> None:
        if not self.sized:
            return
        slots, at = self.slots(body.slots), 0
        for rid, count in zip(body.rids, body.counts):
            mine, at = slots[at : at + count], at + count
            if self.page > 1:
                self._check_pages(mine, rid)
                new = [page for page in np.unique(mine // self.page).tolist() if not self._in_use(page)]
                self.free -= len(new) * self.page
            else:
                self.free -= len(mine)
            self.move(mine, FREE, rid, "a slot is taken once")
        self._stated(body.free)

    def _in_use(self, page: int) -> bool:
        return bool((self.owner[page * self.page : (page + 1) * self.page] != FREE).any())

    def _check_pages(self, slots: Slots, rid: str) -> None:
        for page in np.unique(slots // self.page).tolist():
            owners = set(self.owner[page * self.page : (page + 1) * self.page].tolist()) - {FREE, rid}
            if owners:
                self.fault("a page has one owner", f"page {page} of {rid} is also {_who(owners.pop())}'s")

    def returned(self, body: PoolReturned) -> None:
        if not self.sized:
            return
        slots = self.slots(body.slots)
        owner = body.rid if body.rid else LEAVING
        self.move(slots, owner, FREE, "a slot comes back from its owner")
        self.free += self.pages(slots)
        self._stated(body.free)

    def shrunk(self, body: LimitsChanged) -> None:
        """A debugger took free slots out of the pool for good."""
        if not self.sized:
            return
        slots = self.slots(body.slots)
        self.move(slots, FREE, GONE, "only free slots leave the pool")
        self.free -= self.pages(slots)
        self.total = body.max_total_num_tokens
        self._stated(body.free)

    def _stated(self, free: int) -> None:
        if self.free != free:
            self.fault("free is what was not taken", f"{self.free} tokens by the events, {free} stated")
            self.free = free

    # ------------------------------------------------------------ tree

    def inserted(self, body: TreeInserted) -> None:
        if not self.sized:
            return
        slots = self.slots(body.slots)
        self.move(slots, body.rid, body.node, "a request puts its own slots into the tree")
        if body.node in self.nodes:
            self.fault("a node is inserted once", f"node {body.node} is in the tree")
        self.nodes[body.node] = _Node(body.parent, slots)
        if body.parent in self.nodes:
            self.nodes[body.parent].children += 1

    def split(self, body: TreeSplit) -> None:
        lower = self.nodes.get(body.node)
        if lower is None:
            self.fault("a split node is in the tree", f"node {body.node} is not")
            return
        upper = _Node(lower.parent, lower.slots[: body.at], lower.locks, 1)
        self.nodes[body.upper] = upper
        lower.parent, lower.slots = body.upper, lower.slots[body.at :]
        self.owner[upper.slots] = body.upper

    def evicted(self, body: TreeEvicted) -> None:
        node = self.nodes.pop(body.node, None)
        if node is None:
            self.fault("an evicted node is in the tree", f"node {body.node} is not")
            return
        if node.locks or node.children:
            self.fault(
                "only unlocked leaves are evicted",
                f"node {body.node}: {node.locks} locks, {node.children} children",
            )
        if len(node.slots) != body.tokens:
            self.fault(
                "an evicted node has its tokens", f"node {body.node}: {len(node.slots)}, stated {body.tokens}"
            )
        if node.parent in self.nodes:
            self.nodes[node.parent].children -= 1
        self.owner[node.slots] = LEAVING

    def locked(self, body: TreeLocked) -> None:
        key = (body.rid, body.node)
        held = self.locks.get(key, 0) + body.delta
        if held < 0:
            self.fault("a lock is released by its holder", f"{body.rid} does not hold node {body.node}")
        self.locks[key] = max(0, held)
        if not self.locks[key]:
            del self.locks[key]
        at, moved = body.node, 0
        while at in self.nodes:
            node = self.nodes[at]
            moved += len(node.slots) if (node.locks == 0) == (body.delta > 0) and node.locks in (0, 1) else 0
            node.locks += body.delta
            at = node.parent
        if moved != body.tokens:
            self.fault("a lock protects what it says", f"{moved} tokens by the events, {body.tokens} stated")

    def flushed(self, body: CacheFlushed) -> None:
        if not body.ok:
            return
        if self.locks:
            self.fault("nothing is locked at a flush", f"{next(iter(self.locks))[0]} holds a node")
        for node in self.nodes.values():
            self.owner[node.slots] = LEAVING
        self.nodes, self.locks = {}, {}

    # ------------------------------------------------------------ rows and requests

    def row_taken(self, body: RowTaken) -> None:
        if body.row in self.rows:
            self.fault(
                "a row has one owner", f"row {body.row} is {self.rows[body.row]}'s, taken by {body.rid}"
            )
        self.rows[body.row] = body.rid

    def row_returned(self, body: RowReturned) -> None:
        if self.rows.get(body.row) != body.rid:
            self.fault(
                "a row comes back from its owner", f"row {body.row} is {self.rows.get(body.row, 'nobody')}'s"
            )
        self.rows.pop(body.row, None)

    def disagg_queued(self, body: DisaggQueued) -> None:
        """It lives from here on, though the waiting queue comes later."""
        if body.rid in self.live:
            self.fault("a rid is alive once", body.rid)
        self.aborting.pop(body.rid, None)
        self.draining.pop(body.rid, None)  # an earlier one of that name: its pages are back
        self.live[body.rid] = self.paired[body.rid] = None
        self.transfers.queued(body)

    def entered(self, body: QueueEntered) -> None:
        if body.again and body.rid not in self.live:
            self.fault("only a live request comes back to the queue", body.rid)
        if not body.again and body.rid in self.live and body.rid not in self.paired:
            self.fault("a rid is alive once", body.rid)
        if not body.again:
            self.aborting.pop(body.rid, None)  # of an earlier request of that name, which ended in the queue
        self.live[body.rid] = None

    def streamed(self, body: OutputStreamed) -> None:
        for rid, finished in zip(body.rids, body.finished):
            if finished:
                self._end(rid)

    def aborted(self, body: RequestAborted) -> None:
        if body.where == "tokenizer":
            self.went_on(body)
        if body.where == "running" and body.rid not in self.aborting:
            self.aborting[body.rid] = None
        elif body.where in ENDS_AT_ONCE or body.where == "running":
            self.aborting[body.rid] = None
            self.live.pop(body.rid, None)  # what it sent already follows as a final output
            self._hold_nothing(body.rid)

    def _end(self, rid: str) -> None:
        if rid not in self.live and rid not in self.aborting:
            self.fault("a request ends once", f"{rid} had ended, or never began")
        self.live.pop(rid, None)
        self.aborting.pop(rid, None)
        self._hold_nothing(rid)

    def _hold_nothing(self, rid: str) -> None:
        if rid in self.draining:
            return
        if rid in self.paired:
            del self.paired[rid]
            self.draining[rid] = None
            self.transfers.ended(rid)
            return
        node = next((node for owner, node in self.locks if owner == rid), None)
        if node is not None:
            self.fault("an ended request holds no lock", f"{rid} holds node {node}")
        row = next((row for row, owner in self.rows.items() if owner == rid), None)
        if row is not None:
            self.fault("an ended request holds no row", f"{rid} holds row {row}")

    def went_on(self, body: RequestTokenized | RequestDispatched | RequestAborted) -> None:
        """The TokenizerManager did something for a request."""
        if self.ends.is_over(body.rid):
            self.fault("nothing is done for a request after its end", f"{body.rid} had ended")

    def finished_at_tm(self, body: RequestFinished) -> None:
        if self.ends.is_over(body.rid):
            self.fault("a request ends once", f"{body.rid} had ended")
        self.ends.finished(body)
        if body.rid in self.live and body.reason != "abort":
            self.fault("the client's end follows the scheduler's", f"{body.rid} is still alive there")

    def idle(self, body: LoopIdle) -> None:
        if self.live:
            self.fault("nobody is alive when the loop is idle", f"{next(iter(self.live))} is")
        draining, self.draining = self.draining, {}
        for rid in draining:
            self._hold_nothing(rid)
        self.balance()

    def balance(self) -> None:
        """Allocated less freed is held by live requests and the tree."""
        if not self.sized:
            return
        held = np.flatnonzero((self.owner != FREE) & (self.owner != GONE))
        if self.pages(held) != self.total - self.free:
            self.fault(
                "taken less returned is what is held",
                f"{self.pages(held)} held, {self.total - self.free} taken",
            )
        owners = self.owner[held]
        strangers = [owner for owner in dict.fromkeys(owners.tolist()) if self._is_stranger(owner)]
        if strangers:
            count = int((~_are_not(owners, strangers[0])).sum())
            self.fault(
                "only live requests and the tree hold memory", f"{_who(strangers[0])} holds {count} slots"
            )

    def _is_stranger(self, owner: object) -> bool:
        if isinstance(owner, str):
            return owner not in self.live and owner not in self.aborting and owner not in self.draining
        return owner not in self.nodes


def _are_not(owners: npt.NDArray[np.object_], owner: object) -> npt.NDArray[np.bool_]:
    """Which of `owners` are somebody else. numpy would make a fixed-width text of a bare str, and cut it at a NUL."""
    wanted = np.empty((), dtype=object)
    wanted[()] = owner
    found: npt.NDArray[np.bool_] = owners != wanted
    return found


def _who(owner: object) -> str:
    if owner == FREE:
        return "nobody"
    return f"node {owner}" if isinstance(owner, int) else str(owner)
