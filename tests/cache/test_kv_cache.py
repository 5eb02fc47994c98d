"""KVCache by examples: what each verb does to slots, rows, locks and events."""

from __future__ import annotations

import numpy as np
import pytest
from cache_tools import Request, admit, cache_of, run, silent
from kv_fold import decode

from sgviz.cache.errors import CacheMisuse, OutOfMemory
from sgviz.cache.kv_cache import KVCache
from sgviz.cache.ledger import Ledger
from sgviz.cache.req_kv import NO_ROW
from sgviz.events.schema import (
    CacheFlushed,
    PoolReturned,
    PoolTaken,
    RowReturned,
    RowTaken,
    TreeInserted,
    TreeLocked,
)


def test_worked_example_5_decode_need() -> None:
    cache, _ = cache_of(160, 16)
    at_border, inside = run(cache, "a", list(range(32))), run(cache, "b", list(range(100, 133)))
    assert cache.extend_need([at_border], [33]) == 16
    assert cache.extend_need([inside], [34]) == 0
    assert cache.extend_need([at_border, inside], [33, 34]) == 16


def test_worked_example_8_finish_insert() -> None:
    """Prompt 10, outputs 6: 15 positions have KV; with page 4 12 are kept and 3 slots freed."""
    cache, sink = cache_of(32, 4)
    ids = list(range(10))
    req = run(cache, "a", ids)
    cache.checkpoint(req, ids)
    ids += [20, 21, 22, 23, 24]
    for length in range(11, 16):
        cache.alloc_extend([req], [length])
    sink.drain()
    cache.release(req, ids, insert=True, why="finish")
    assert cache.ledger() == Ledger(free=20, evictable=12, protected=0, private=0, total=32)
    (returned,) = [body for body in sink.drain() if isinstance(body, PoolReturned)]
    assert (returned.why, returned.free, len(decode(returned.slots))) == ("tail", 20, 3)
    assert cache.peek([*ids, 25], "") == 12
    cache.check([])


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    cache, _ = cache_of(32, 1)
    ids = list(range(10))
    cache.release(run(cache, "a", ids), ids, insert=True, why="finish")
    assert cache.match(ids, "", 9).length == 9
    assert cache.match(ids, "", 4).length == 4
    assert cache.match(ids, "", 0).length == 0 and cache.match(ids, "", -1).length == 0


def test_hits_are_counted_by_admission_not_by_looking() -> None:
    cache, _ = cache_of(32, 1)
    cache.checkpoint(run(cache, "a", [1, 2, 3]), [1, 2, 3])
    for _ in range(3):
        cache.match([1, 2, 3], "", 3)
    assert [node.hit_count for node in cache.tree.nodes()] == [0]
    admit(cache, "b", [1, 2, 9])
    assert [node.hit_count for node in cache.tree.nodes()] == [1, 0], "the head that was shared, not the rest"


def test_the_limit_is_floored_to_pages() -> None:
    cache, _ = cache_of(32, 4)
    ids = list(range(12))
    cache.release(run(cache, "a", ids), ids, insert=True, why="finish")
    assert cache.match(ids, "", 11).length == 8
    assert cache.peek(ids, "", limit=7) == 4
    assert cache.match([1, 2], "", 2).length == 0, "shorter than a page"


def test_the_row_begins_with_the_shared_prefix() -> None:
    cache, _ = cache_of(32, 4)
    ids = list(range(12))
    first = run(cache, "a", ids)
    cache.checkpoint(first, ids)
    second = run(cache, "b", [*range(8), 50, 51, 52])
    assert second.kv.protected == 8
    assert cache.row_slots(second)[:8].tolist() == cache.row_slots(first)[:8].tolist()
    assert cache.row_slots(second)[8] not in cache.row_slots(first)
    assert len(second.kv.prefix) == 0
    cache.check([first, second])


def test_checkpoint_turns_duplicates_over_to_the_tree() -> None:
    """Two cold requests compute the same head; the second gives its pages back and reads the first one's."""
    cache, sink = cache_of(32, 4)
    ids = list(range(9))
    first, second = admit(cache, "a", ids), admit(cache, "b", ids)
    cache.alloc_extend([first, second], [9, 9])
    own = cache.row_slots(second)
    cache.checkpoint(first, ids)
    sink.drain()
    cache.checkpoint(second, ids)
    assert cache.row_slots(second)[:8].tolist() == cache.row_slots(first)[:8].tolist()
    assert cache.row_slots(second)[8] == own[8], "the tail stays its own"
    returned, locked = sink.drain()
    assert isinstance(returned, PoolReturned) and (returned.rid, returned.why) == ("b", "duplicate")
    assert decode(returned.slots) == own[:8].tolist()
    assert isinstance(locked, TreeLocked) and (locked.rid, locked.tokens) == ("b", 0)
    assert cache.ledger() == Ledger(free=16, evictable=0, protected=8, private=8, total=32)
    cache.check([first, second])


def test_checkpoint_locks_the_new_node_before_it_unlocks_the_old_one() -> None:
    cache, sink = cache_of(32, 1)
    req = run(cache, "a", [1, 2])
    cache.checkpoint(req, [1, 2])
    cache.alloc_extend([req], [4])
    sink.drain()
    cache.checkpoint(req, [1, 2, 3, 4])
    inserted, lock, unlock = sink.drain()
    assert isinstance(inserted, TreeInserted) and inserted.present == 2
    assert isinstance(lock, TreeLocked) and isinstance(unlock, TreeLocked)
    assert (lock.delta, lock.tokens, unlock.delta, unlock.tokens) == (1, 2, -1, 0)
    assert cache.protected_size() == 4
    cache.checkpoint(req, [1, 2, 3, 4])
    assert sink.drain() == [], "nothing new, nothing told"


def test_release_without_insert_frees_exactly_the_private_part() -> None:
    cache, sink = cache_of(32, 4)
    ids = list(range(10))
    req = run(cache, "a", ids)
    cache.checkpoint(req, ids)
    private = cache.row_slots(req)[8:].tolist()
    sink.drain()
    cache.release(req, ids, insert=False, why="retract")
    returned, unlocked, row = sink.drain()
    assert isinstance(returned, PoolReturned) and returned.why == "retract"
    assert decode(returned.slots) == private
    assert isinstance(unlocked, TreeLocked) and unlocked.tokens == 8
    assert row == RowReturned(rid="a", row=1)
    assert cache.ledger() == Ledger(free=24, evictable=8, protected=0, private=0, total=32)
    assert (req.kv.req_pool_idx, req.kv.allocated, req.kv.node) == (NO_ROW, 0, None)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 17, 32])
@pytest.mark.parametrize("insert", [True, False])
def test_release_with_one_position_too_many(page_size: int, length: int, insert: bool) -> None:
    """The overlap loop has allocated a position whose token is dropped."""
    cache, _ = cache_of(64, page_size)
    ids = list(range(length))
    req = run(cache, "a", ids, extra=1)
    cache.release(req, ids, insert=insert, why="finish")
    kept = length // page_size * page_size if insert else 0
    assert cache.ledger() == Ledger(64 - kept, kept, 0, 0, 64)
    cache.check([])


def test_release_of_a_request_that_never_got_a_row() -> None:
    cache, sink = cache_of(32, 4)
    ids = list(range(12))
    cache.release(run(cache, "a", ids), ids, insert=True, why="finish")
    req = admit(cache, "b", ids)
    assert cache.protected_size() == 8
    sink.drain()
    cache.release(req, ids, insert=True, why="abort")
    assert [type(body) for body in sink.drain()] == [TreeLocked]
    cache.release(Request("c", [1]), [1], insert=False, why="abort")
    assert sink.drain() == [] and cache.evictable_size() == 12
    cache.check([])


def test_release_with_fewer_ids_than_are_protected_keeps_the_tree() -> None:
    cache, _ = cache_of(32, 4)
    ids = list(range(12))
    req = run(cache, "a", ids)
    cache.checkpoint(req, ids)
    cache.alloc_extend([req], [14])
    cache.release(req, ids[:3], insert=True, why="abort")
    assert cache.ledger() == Ledger(20, 12, 0, 0, 32)
    cache.check([])


def test_one_event_for_a_whole_batch() -> None:
    cache, sink = cache_of(32, 1)
    a, b = admit(cache, "a", [1, 2, 3]), admit(cache, "b", [4, 5])
    slots = cache.alloc_extend([a, b], [3, 2])
    taken_a, taken_b, pool = sink.drain()
    assert taken_a == RowTaken(rid="a", row=1) and taken_b == RowTaken(rid="b", row=2)
    assert isinstance(pool, PoolTaken)
    assert (pool.rids, pool.counts, pool.free) == (("a", "b"), (3, 2), 27)
    assert decode(pool.slots) == slots.tolist() == [1, 2, 3, 4, 5]
    assert cache.row_slots(b).tolist() == [4, 5]


def test_a_silent_tracer_gets_nothing_and_changes_nothing() -> None:
    loud, _ = cache_of(32, 4)
    quiet = KVCache(size=32, page_size=4, rows=4, max_context_len=64, trace=silent())
    ids = list(range(11))
    rows = []
    for cache in (loud, quiet):
        req = run(cache, "a", ids)
        cache.checkpoint(req, ids)
        rows.append(cache.row_slots(req).tolist())
    assert rows[0] == rows[1] and loud.ledger() == quiet.ledger()


def test_allocation_evicts_what_it_needs() -> None:
    cache, sink = cache_of(16, 4)
    cache.release(run(cache, "a", list(range(12))), list(range(12)), insert=True, why="finish")
    sink.drain()
    run(cache, "b", list(range(50, 57)))
    returned = [body for body in sink.drain() if isinstance(body, PoolReturned)]
    assert [(body.why, body.rid) for body in returned] == [("evict", "")]
    assert cache.private_size() == 8


def snapshot(cache: KVCache, req: Request) -> tuple[object, ...]:
    return cache.ledger(), cache.req_to_token_pool.available_size(), req.kv.req_pool_idx, req.kv.allocated


def test_out_of_memory_changes_nothing() -> None:
    cache, sink = cache_of(16, 4)
    cache.release(run(cache, "a", [1, 2, 3, 4]), [1, 2, 3, 4], insert=True, why="finish")
    running, new = run(cache, "b", list(range(50, 57))), admit(cache, "c", list(range(60, 75)))
    before = snapshot(cache, new), snapshot(cache, running)
    sink.drain()
    with pytest.raises(
        OutOfMemory, match="16 tokens are needed for 2 requests, there are free 4 \\+ evictable 4"
    ):
        cache.alloc_extend([running, new], [9, 12])
    assert (snapshot(cache, new), snapshot(cache, running)) == before and sink.drain() == []
    cache.check([running, new])


def test_out_of_rows_changes_nothing() -> None:
    cache, _ = cache_of(32, 1)
    reqs = [admit(cache, str(i), [i, i]) for i in range(5)]
    with pytest.raises(OutOfMemory, match="5 rows are needed, 4 of 4 are free"):
        cache.alloc_extend(reqs, [2] * 5)
    assert cache.ledger().free == 32 and all(req.kv.req_pool_idx == NO_ROW for req in reqs)


def test_a_row_is_never_overrun() -> None:
    cache, _ = cache_of(128, 1)
    req = admit(cache, "a", [1])
    with pytest.raises(CacheMisuse, match="request a would grow to 65 tokens, a row has 64"):
        cache.alloc_extend([req], [65])


def test_ensure_says_whether_there_is_room() -> None:
    cache, _ = cache_of(16, 4)
    cache.release(run(cache, "a", list(range(8))), list(range(8)), insert=True, why="finish")
    assert cache.room() == 16 and cache.available_size() == 8
    assert cache.ensure(8) and cache.evictable_size() == 8
    assert cache.ensure(12) and cache.evictable_size() == 0
    run(cache, "b", [1, 2, 3, 4, 5])
    assert not cache.ensure(12)


def test_what_is_held_is_not_room_and_nobody_is_told() -> None:
    cache, sink = cache_of(16, 4)
    ids = list(range(8))
    cache.release(run(cache, "a", ids), ids, insert=True, why="finish")
    match = cache.match(ids, "", 7)
    sink.drain()
    with pytest.raises(RuntimeError), cache.held(match.node):
        assert cache.room() == 12 and cache.evict(99) == 4
        sink.drain()
        raise RuntimeError
    assert cache.room() == 16 and sink.drain() == []


def test_a_lock_taken_while_held_is_told_in_full() -> None:
    cache, sink = cache_of(16, 4)
    ids = list(range(8))
    cache.release(run(cache, "a", ids), ids, insert=True, why="finish")
    match = cache.match(ids, "", 7)
    sink.drain()
    req = Request("b", ids)
    with cache.held(match.node):
        cache.adopt(req, match)
    assert sink.drain() == [TreeLocked(rid="b", node=match.node.id, delta=1, tokens=4)]
    cache.check([req])


def test_a_match_does_not_outlive_its_node() -> None:
    cache, _ = cache_of(16, 1)
    cache.release(run(cache, "a", [1, 2, 3]), [1, 2, 3], insert=True, why="finish")
    evicted = cache.match([1, 2, 3], "", 3)
    cache.evict(99)
    cache.release(run(cache, "a", [1, 2, 3]), [1, 2, 3], insert=True, why="finish")
    flushed = cache.match([1, 2, 3], "", 3)
    assert cache.flush()
    for match in (evicted, flushed):
        with pytest.raises(CacheMisuse, match="evicted after the match"):
            cache.adopt(Request("b", [1, 2, 3]), match)


def test_misuse_is_refused_before_anything_changes() -> None:
    cache, _ = cache_of(32, 1)
    req = run(cache, "a", [1, 2, 3])
    cache.checkpoint(req, [1, 2])
    with pytest.raises(CacheMisuse, match="request a holds KV already"):
        cache.adopt(req, cache.match([1], "", 1))
    with pytest.raises(CacheMisuse, match="4 ids cannot be cached, row 1 has 3 positions"):
        cache.checkpoint(req, [1, 2, 3, 4])
    with pytest.raises(CacheMisuse, match="not the 2 it has locked"):
        cache.checkpoint(req, [7, 8, 9])
    cache.check([req])


def test_flush_only_when_nobody_holds_memory() -> None:
    cache, sink = cache_of(32, 4)
    ids = list(range(8))
    req = run(cache, "a", ids)
    sink.drain()
    assert not cache.flush()
    assert sink.drain() == [CacheFlushed(ok=False, why="requests hold 0 protected and 8 private tokens")]
    cache.checkpoint(req, ids)
    assert not cache.flush()
    cache.release(req, ids, insert=True, why="finish")
    sink.drain()
    assert cache.flush()
    flushed, returned = sink.drain()
    assert flushed == CacheFlushed(ok=True, why="")
    assert isinstance(returned, PoolReturned) and (returned.why, returned.free) == ("flush", 32)
    assert cache.peek(ids, "") == 0 and cache.ledger().free == 32
    cache.check([])


def test_without_a_tree_nothing_is_kept() -> None:
    cache, sink = cache_of(32, 4, disabled=True)
    ids = list(range(9))
    req = run(cache, "a", ids)
    cache.checkpoint(req, ids)
    assert req.kv.protected == 0
    sink.drain()
    cache.release(req, ids, insert=True, why="finish")
    (returned, _) = sink.drain()
    assert isinstance(returned, PoolReturned) and returned.why == "finish"
    assert cache.ledger().free == 32
    assert cache.match(ids, "", 8).length == 0 and cache.peek(ids, "") == 0 and cache.peek_path(ids, "") == ()
    cache.check([])


def test_two_caches_do_not_know_each_other() -> None:
    one, _ = cache_of(32, 1)
    two, _ = cache_of(32, 1)
    one.release(run(one, "a", [1, 2, 3]), [1, 2, 3], insert=True, why="finish")
    assert two.peek([1, 2, 3], "") == 0 and two.available_size() == 32
    assert not np.shares_memory(one.req_to_token_pool.table, two.req_to_token_pool.table)
