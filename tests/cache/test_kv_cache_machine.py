"""KVCache under random lives of requests. After every step: the audit passes, the fold of the events is the
true state, and every slot holds the KV that its owner expects (KV is stood for by the whole prefix).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from cache_tools import Choose, Request, case_of, drawn, listening, some_ids
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_fold import KvFold, Owner

from sgviz.cache.errors import OutOfMemory
from sgviz.cache.kv_cache import KVCache
from sgviz.cache.req_kv import NO_ROW
from sgviz.events.schema import AnyBody, PoolReturned

PAGES = 14
ROWS = 4
Content = tuple[str, tuple[int, ...]]  # namespace and all tokens up to this one: what KV depends on


class KvWorld:
    """A cache, the requests that use it, what their KV should be, and the fold of the events."""

    def __init__(self, page_size: int, disabled: bool, pages: int = PAGES) -> None:
        self.page_size = page_size
        self.disabled = disabled
        trace, self.sink = listening()
        size = pages * page_size
        self.cache = KVCache(
            size=size,
            page_size=page_size,
            rows=ROWS,
            max_context_len=2 * size,
            trace=trace,
            disable_radix_cache=disabled,
        )
        self.fold = KvFold(size, page_size)
        self.content: dict[int, Content] = {}
        self.live: list[Request] = []  # admitted; the first `done` of their ids have KV
        self.done: dict[str, int] = {}
        self.born = 0
        self.seen: Counter[str] = Counter()  # what happened, to know that a walk has been everywhere

    def unfinished(self) -> list[Request]:
        return [req for req in self.live if self.done[req.rid] < len(req.ids)]

    def decoding(self) -> list[Request]:
        """All ids have KV, and no position beyond them is allocated."""
        return [req for req in self.live if req.kv.req_pool_idx != NO_ROW and self.settled(req)]

    def settled(self, req: Request) -> bool:
        return self.done[req.rid] == len(req.ids) == req.kv.allocated

    def committed(self, req: Request) -> list[int]:
        return req.ids[: self.done[req.rid]]

    def compute(self, reqs: list[Request], lens: list[int]) -> None:
        """Allocate and run a forward: KV is written into the slots that came, or nothing happens."""
        need, room, before = self.cache.extend_need(reqs, lens), self.cache.room(), self.cache.ledger()
        rows = sum(req.kv.req_pool_idx == NO_ROW for req in reqs)
        fits = need <= room and rows <= self.cache.req_to_token_pool.available_size()
        starts = [req.kv.allocated for req in reqs]
        try:
            slots = self.cache.alloc_extend(reqs, lens).tolist()
        except OutOfMemory:
            self.seen["out of memory"] += 1
            assert not fits and self.cache.ledger() == before and not self.sink.bodies
            return
        assert fits and self.cache.private_size() == before.private + need
        for req, start, end in zip(reqs, starts, lens, strict=True):
            for position in range(start, end):
                self.content[slots.pop(0)] = (req.namespace, tuple(req.ids[: position + 1]))
            self.done[req.rid] = min(end, len(req.ids))
        assert not slots

    # ------------------------------------------------------------ what can happen

    def arrive(self, choose: Choose) -> None:
        """A request is admitted; its prefix is locked under the temporary lock."""
        if len(self.live) > ROWS + 1:
            return
        ids = some_ids(choose, self.page_size, choose(6), 1 + choose(self.page_size))
        self.born += 1
        req = Request(f"r{self.born}", ids, "x" if choose(4) == 0 else "")
        match = self.cache.match(ids, req.namespace, len(ids) - 1)
        assert match.length == len(match.slots) == self.cache.peek(ids, req.namespace, limit=len(ids) - 1)
        with self.cache.held(match.node):
            self.cache.adopt(req, match)
        self.live.append(req)
        self.done[req.rid] = match.length

    def prefill(self, choose: Choose) -> None:
        """Up to three requests get all or a chunk of what they miss."""
        reqs = self.unfinished()[: 1 + choose(3)]
        missing = [len(req.ids) - self.done[req.rid] for req in reqs]
        whole = choose(2) == 0
        self.compute(
            reqs,
            [
                self.done[req.rid] + (n if whole else 1 + choose(n))
                for req, n in zip(reqs, missing, strict=True)
            ],
        )

    def decode(self, choose: Choose) -> None:
        """All that can decode append a token and compute it; if they do not fit they lose it again."""
        reqs = self.decoding()
        for req in reqs:
            req.ids.append(choose(2))
        self.compute(reqs, [len(req.ids) for req in reqs])
        for req in reqs:
            del req.ids[self.done[req.rid] :]

    def overrun(self, choose: Choose) -> None:
        """The overlap loop: a position is allocated for a token that will be dropped."""
        for req in self.decoding()[:1]:
            req.ids.append(9)
            self.compute([req], [len(req.ids)])
            req.ids.pop()
            self.done[req.rid] = len(req.ids)

    def checkpoint(self, choose: Choose) -> None:
        reqs = [req for req in self.live if req.kv.req_pool_idx != NO_ROW]
        if reqs:
            req = reqs[choose(len(reqs))]
            self.cache.checkpoint(req, self.committed(req))
            if not self.disabled:
                assert req.kv.protected == self.done[req.rid] // self.page_size * self.page_size

    def end(self, choose: Choose) -> None:
        if not self.live:
            return
        req = self.live.pop(choose(len(self.live)))
        insert, had_row, ids = choose(3) > 0, req.kv.req_pool_idx != NO_ROW, self.committed(req)
        if not had_row:
            self.seen["ended without a row"] += 1
        self.cache.release(req, ids, insert=insert, why="finish" if insert else "retract")
        if insert and had_row and not self.disabled:
            assert self.cache.peek(ids, req.namespace) == len(ids) // self.page_size * self.page_size

    def evict(self, choose: Choose) -> None:
        tokens, evictable, free = choose(30), self.cache.evictable_size(), self.cache.available_size()
        freed = self.cache.evict(tokens)
        assert freed >= min(tokens, evictable) and self.cache.available_size() == free + freed

    def ensure(self, choose: Choose) -> None:
        tokens, room = choose(self.cache.total + 2), self.cache.room()
        assert self.cache.ensure(tokens) == (tokens <= room)

    def flush(self, choose: Choose) -> None:
        if choose(4) == 0:
            for req in self.live:
                self.cache.release(req, [], insert=False, why="abort")
            self.live.clear()
        ledger = self.cache.ledger()
        assert self.cache.flush() == (ledger.protected == ledger.private == 0)

    # ------------------------------------------------------------ what must hold

    def verify(self) -> None:
        self.the_books_balance()
        self.the_fold_is_the_state()
        self.every_request_reads_its_own_kv()
        self.the_tree_holds_what_it_says()

    def true_owners(self) -> dict[int, Owner]:
        owners: dict[int, Owner] = {}
        for req in self.live:
            if req.kv.req_pool_idx != NO_ROW:
                for slot in self.cache.row_slots(req)[req.kv.protected :].tolist():
                    owners[slot] = ("request", req.rid)
        for node in self.cache.tree.nodes():
            owners.update((slot, ("node", node.id)) for slot in node.value.tolist())
        return owners

    def the_books_balance(self) -> None:
        self.cache.check(self.live)
        assert self.cache.ledger().balanced

    def the_fold_is_the_state(self) -> None:
        for body in self.sink.drain():
            self.seen[name_of(body)] += 1
            self.fold.apply(body)
        assert self.fold.ledger() == self.cache.ledger()
        assert self.fold.owners == self.true_owners()
        assert self.fold.rows == {
            req.kv.req_pool_idx: req.rid for req in self.live if req.kv.req_pool_idx != NO_ROW
        }
        nodes = {
            node.id: (node.value.tolist(), node.key.tolist(), node.lock_ref)
            for node in self.cache.tree.nodes()
        }
        assert {id: (node.slots, node.token_ids, node.locks) for id, node in self.fold.nodes.items()} == nodes
        for req in self.live:
            row = req.kv.prefix if req.kv.req_pool_idx == NO_ROW else self.cache.row_slots(req)
            assert (
                self.fold.path_slots(self.fold.locked_by.get(req.rid, 0)) == row[: req.kv.protected].tolist()
            )

    def every_request_reads_its_own_kv(self) -> None:
        for req in self.live:
            slots = (req.kv.prefix if req.kv.req_pool_idx == NO_ROW else self.cache.row_slots(req)).tolist()
            assert len(slots) >= self.done[req.rid]
            for position, slot in enumerate(slots[: self.done[req.rid]]):
                assert self.content[slot] == (req.namespace, tuple(req.ids[: position + 1]))

    def the_tree_holds_what_it_says(self) -> None:
        for node in self.cache.tree.nodes():
            ids = [token for part in node.path() for token in part.key.tolist()]
            start = len(ids) - len(node.key)
            for at, slot in enumerate(node.value.tolist()):
                assert self.content[slot] == (node.namespace, tuple(ids[: start + at + 1]))


def name_of(body: AnyBody) -> str:
    return type(body).__name__ + (f" {body.why}" if isinstance(body, PoolReturned) else "")


OPS: tuple[Callable[[KvWorld, Choose], None], ...] = (
    *[KvWorld.arrive] * 4,
    *[KvWorld.prefill] * 5,
    *[KvWorld.decode] * 5,
    *[KvWorld.checkpoint] * 4,
    *[KvWorld.end] * 3,
    KvWorld.overrun,
    KvWorld.evict,
    KvWorld.ensure,
    KvWorld.flush,
)  # fmt: skip


class KvMachine(RuleBasedStateMachine):
    page_size = 1
    disabled = False

    def __init__(self) -> None:
        super().__init__()
        self.world = KvWorld(self.page_size, self.disabled)

    @rule(op=st.sampled_from(OPS), data=st.data())
    def step(self, op: Callable[[KvWorld, Choose], None], data: st.DataObject) -> None:
        op(self.world, drawn(data))

    @invariant()
    def all_is_well(self) -> None:
        self.world.verify()


TestKvPage1 = case_of(KvMachine, 20, 50, page_size=1)
TestKvPage2 = case_of(KvMachine, 20, 50, page_size=2)
TestKvPage4 = case_of(KvMachine, 20, 50, page_size=4)
TestKvPage16 = case_of(KvMachine, 20, 50, page_size=16)
TestKvPage4WithoutTree = case_of(KvMachine, 20, 50, page_size=4, disabled=True)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_long_walks_go_everywhere(page_size: int) -> None:
    """Long seeded lives, deep in eviction and sharing, where short examples seldom come."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        rng = random.Random(seed)
        world = KvWorld(page_size, disabled=False, pages=PAGES + 10 * (seed % 3))
        for _ in range(500):
            rng.choice(OPS)(world, rng.randrange)
            world.verify()
        seen += world.seen
    rare = ("PoolReturned duplicate", "PoolReturned evict", "PoolReturned retract", "PoolReturned abort",
            "PoolReturned flush", "TreeSplit", "out of memory", "ended without a row")  # fmt: skip
    assert min(seen[name] for name in rare) >= 10, seen
    assert page_size == 1 or seen["PoolReturned tail"] >= 10
