"""What a parked scheduler shows of itself, as values that no longer change.

Imports: batch, cache, messages, scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.tree_node import TreeNode, as_bytes
from sgviz.errors import NotFound, suggest
from sgviz.messages.debug import (
    AdderView,
    BatchView,
    DebugView,
    LimitsView,
    PoolsView,
    ReqView,
    Section,
    TreeNodeView,
    TypeView,
)
from sgviz.scheduler.gate.limits import LimitChanges
from sgviz.scheduler.planner import Planner
from sgviz.scheduler.policy import policy_names
from sgviz.scheduler.state import SchedulerState

LONG = 16  # entries of a list that a type shows in full


class Viewer:
    """Looks; changes nothing."""

    def __init__(self, state: SchedulerState, planner: Planner, changes: LimitChanges) -> None:
        self._state = state
        self._planner = planner
        self._changes = changes

    def view(self, what: Iterable[Section], rid: str) -> DebugView:
        """The sections named. Raises NotFound for the types of a rid that is not live."""
        made: dict[str, Any] = {name: getattr(self, f"_{name}")() for name in what if name != "types"}
        if "types" in what:
            made["types"] = tuple(self._types(rid))
        return DebugView(**made)

    # ------------------------------------------------------------ requests

    def _waiting(self) -> tuple[ReqView, ...]:
        return tuple(self._req(req, "waiting") for req in self._state.waiting_queue)

    def _chunked(self) -> tuple[ReqView, ...]:
        chunked = self._state.chunked_req
        return () if chunked is None else (self._req(chunked, "chunked"),)

    def _running(self) -> tuple[ReqView, ...]:
        state = self._state
        queued = (*state.waiting_queue, *state.grammar_queue, *state.disagg.waiting())
        elsewhere = {id(req) for req in (*queued, state.chunked_req)}  # membership only
        return tuple(self._req(req, "running") for req in state.live.values() if id(req) not in elsewhere)

    def _place(self, req: Req) -> str:
        if req is self._state.chunked_req:
            return "chunked"
        if any(other is req for other in self._state.grammar_queue):
            return "grammar"
        return "waiting" if any(other is req for other in self._state.waiting_queue) else "running"

    def _req(self, req: Req, place: str) -> ReqView:
        adder = self._planner.adder
        admitted = (
            self._planner.is_scanning and adder is not None and any(one is req for one in adder.can_run_list)
        )
        return ReqView(
            rid=req.rid,
            place=place,
            prompt=len(req.origin_input_ids),
            output=len(req.output_ids),
            max_new=req.max_new_tokens,
            prefix=req.prefix_len,
            extend_end=req.extend_end,
            kv_allocated=req.kv.allocated,
            kv_protected=req.kv.protected,
            row=req.kv.req_pool_idx,
            inflight=req.inflight,
            retractions=req.retraction_count,
            admitted=admitted,
            ending=req.to_finish is not None or req.finished,
        )

    # ------------------------------------------------------------ budgets and memory

    def _adder(self) -> AdderView | None:
        planner = self._planner
        adder = planner.adder
        if adder is None:
            return None
        # memory has moved since a plan that is over, so its room is the one it ended with
        room = adder.cache.room() if planner.is_scanning else planner.adder_room
        return AdderView(
            planning=planner.is_scanning,
            iteration=planner.adder_iteration,
            rem_total=int(room - adder.total_offset),
            cur_rem=room - adder.current_offset,
            rem_input=adder.rem_input,
            rem_chunk=adder.rem_chunk,
            reserved=int(adder.total_offset),
            can_run=tuple(req.rid for req in adder.can_run_list),
            chunked=adder.new_chunked_req.rid if adder.new_chunked_req is not None else "",
        )

    def _pools(self) -> PoolsView:
        state = self._state
        ledger, page = state.cache.ledger(), state.limits.page_size
        held = [
            (req.rid, -(-(req.kv.allocated - req.kv.protected) // page) * page)
            for req in state.live.values()
            if req.kv.req_pool_idx
        ]
        held.sort(key=lambda item: (-item[1], item[0]))
        rows = state.cache.req_to_token_pool
        return PoolsView(
            total=ledger.total,
            free=ledger.free,
            evictable=ledger.evictable,
            protected=ledger.protected,
            private=ledger.private,
            moving=ledger.total - ledger.free - ledger.evictable - ledger.protected - ledger.private,
            rows=rows.size,
            free_rows=rows.available_size(),
            held=tuple(held),
        )

    def _limits(self) -> LimitsView:
        limits = self._state.limits
        return LimitsView(
            max_running_requests=limits.max_running_requests,
            chunked_prefill_size=limits.chunked_prefill_size or -1,
            schedule_policy=self._planner.policy.name,
            max_total_tokens=self._state.cache.total,
            to_retire=self._changes.to_retire,
            pending=dict(self._changes.pending),
            policies=policy_names(),
        )

    def _tree(self) -> tuple[TreeNodeView, ...]:
        owners: dict[int, list[str]] = {}
        for req in self._state.live.values():
            for node in req.kv.node.path() if req.kv.node is not None else ():
                owners.setdefault(node.id, []).append(req.rid)
        return tuple(_node(node, tuple(owners.get(node.id, ()))) for node in self._state.cache.tree.nodes())

    def _batches(self) -> tuple[BatchView, ...]:
        return tuple(_batch(place, batch) for place, batch in self._named_batches())

    def _named_batches(self) -> Iterator[tuple[str, ScheduleBatch]]:
        state = self._state
        last, running = state.last_batch, state.running_batch
        if last is not None and last is not running:
            yield "planned last", last
        if not running.is_empty:
            yield "running", running

    # ------------------------------------------------------------ types of one request

    def _types(self, rid: str) -> Iterator[TypeView]:
        req = self._state.live.get(rid)
        if req is None:
            near = suggest(rid, self._state.live)
            raise NotFound(
                f"no request {rid!r} is in the scheduler; {len(self._state.live)} are{near}", param="rid"
            )
        own = fields_of(req, skip=("kv", "time_stats", "sampling_params"))
        yield TypeView(type="Req", component="scheduler", fields={"place": self._place(req)} | own)
        yield TypeView(type="SamplingParams", component="scheduler", fields=fields_of(req.sampling_params))
        node = req.kv.node.id if req.kv.node is not None else None
        kv = fields_of(req.kv, skip=("node",)) | {"node": node}
        yield TypeView(type="ReqKvInfo", component="scheduler", fields=kv)
        for place, batch in self._named_batches():
            at = next((i for i, one in enumerate(batch.reqs) if one is req), None)
            if at is not None:
                yield TypeView(type="ScheduleBatch", component="scheduler", fields=_member(place, batch, at))


def _node(node: TreeNode, owners: tuple[str, ...]) -> TreeNodeView:
    return TreeNodeView(
        node=node.id,
        parent=node.parent.id if node.parent is not None else 0,
        depth=len(node.path()) - 1,
        tokens=len(node.key),
        token_ids=as_bytes(node.key),
        locks=node.lock_ref,
        last_access=node.last_access,
        hits=node.hit_count,
        owners=owners,
    )


def _batch(place: str, batch: ScheduleBatch) -> BatchView:
    return BatchView(
        place=place,
        bid=batch.bid,
        mode=batch.forward_mode.value,
        rids=tuple(req.rid for req in batch.reqs),
        prefix_lens=tuple(batch.prefix_lens),
        extend_lens=tuple(batch.extend_lens),
    )


def _member(place: str, batch: ScheduleBatch, at: int) -> dict[str, Any]:
    """A batch as its member `at` sees it; lengths of a past forward are not its own any more."""
    facts: dict[str, Any] = {
        "place": place, "bid": batch.bid, "forward_mode": batch.forward_mode.value, "reqs": len(batch.reqs),
        "member": at,
    }  # fmt: skip
    if len(batch.seq_lens) == len(batch.reqs):
        facts |= {
            "prefix_len": batch.prefix_lens[at],
            "extend_len": batch.extend_lens[at],
            "seq_len": batch.seq_lens[at],
        }
    return facts


def fields_of(value: object, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass or struct as plain values: lists up to LONG entries, of longer ones the length."""
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    else:
        names = tuple(field.name for field in dataclasses.fields(value))  # type: ignore[arg-type]
    return {
        name: _plain(getattr(value, name)) for name in names if name not in skip and not name.startswith("_")
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, msgspec.Struct):
        return fields_of(value)
    try:
        count = len(value)
    except TypeError:
        return str(value)
    if count > LONG or isinstance(value, dict):
        return f"{count} entries"
    return [_plain(item) for item in (value.tolist() if hasattr(value, "tolist") else value)]
