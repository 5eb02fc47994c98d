"""The decode side: prompts are computed elsewhere, their KV comes here, and the rest of the answer is decoded.

Bootstrap queue -> prealloc queue -> row and pages, transfer queue -> ready, for the next PREBUILT batch. Retracted
requests come back first. Mirrors SGLang's DecodePreallocQueue and DecodeTransferQueue (facts 12.3). Simplified: no
rows beside those of max_running_requests, so who arrives has its running slot already.
Imports: batch, disaggregation (protocol), config, messages, events, scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.batch.transfer import Bootstrap
from sgviz.config import DisaggregationConfig
from sgviz.disaggregation.fake import FakeTransfer
from sgviz.disaggregation.limits import LOOK_MS
from sgviz.disaggregation.protocol import DecodeKVManager, KVPoll, KVReceiver, prompt_mark
from sgviz.disaggregation.waiting import pump_until
from sgviz.errors import BadRequest
from sgviz.events import schema
from sgviz.messages import TokenizedGenerateReqInput
from sgviz.scheduler.disagg.budget import DecodeBudget
from sgviz.scheduler.disagg.kept import Keeper, Restore
from sgviz.scheduler.disagg.side import Hall

log = logging.getLogger(__name__)


class DecodeSide:
    """Implements Side."""

    def __init__(
        self, hall: Hall, manager: DecodeKVManager, keeper: Keeper, config: DisaggregationConfig
    ) -> None:
        self._hall = hall
        self.state = hall.state
        self._manager = manager
        self._keeper = keeper
        self._budget = DecodeBudget(hall.state, config.num_reserved_decode_tokens)
        self._interval = config.disaggregation_decode_polling_interval
        self._turns = 0
        self._refused: tuple[str, str] | None = None

    @property
    def busy(self) -> bool:
        queues = self.state.disagg
        return self._manager.busy or bool(queues.draining or queues.transfer or queues.retracted)

    @property
    def wait_ms(self) -> int:
        """The copies of those that were retracted are not the manager's, and wake nobody."""
        queues = self.state.disagg
        copies = (
            queues.draining
            or queues.retracted
            or any(isinstance(r.transfer, Restore) for r in queues.transfer)
        )
        return self._manager.wait_ms if self._manager.busy and not copies else LOOK_MS

    def meet(self, req: Req, message: TokenizedGenerateReqInput) -> None:
        bootstrap = self._hall.bootstrap(message)
        assert bootstrap is not None  # refused before
        req.transfer = self._receiver_for(req.rid, len(req.origin_input_ids), bootstrap)
        req.bootstrap, req.is_hollow = bootstrap, isinstance(req.transfer, FakeTransfer)

    def turn_away(self, message: TokenizedGenerateReqInput, why: str, status: int) -> None:
        bootstrap = self._hall.bootstrap(message)
        if bootstrap is None:
            return
        try:
            receiver = self._receiver_for(message.rid, len(message.input_ids), bootstrap)
        except BadRequest:  # the room is another request's
            return
        receiver.abort(why, status)

    def enter(self, req: Req) -> None:
        self._hall.queue(req)

    def close(self) -> None:
        self._manager.close()

    def before_launch(self, batch: ScheduleBatch) -> None:
        """Nothing is sent from here."""

    def while_running(self, done: Callable[[], bool]) -> None:
        if not self._turns % self._interval:
            pump_until(self._manager, done)

    def look(self) -> None:
        state = self.state
        self._turns += 1
        if state.running_batch.reqs and self._turns % self._interval:
            return
        self._manager.pump()
        state.drain()
        self._end_failed()
        self._take_met()
        self._take_arrived()
        if state.pause is None:
            self._resume_retracted()
            self._preallocate()

    def _receiver_for(self, rid: str, tokens: int, bootstrap: Bootstrap) -> KVReceiver:
        return self._manager.create_receiver(
            rid, bootstrap.room, bootstrap.host, bootstrap.port, tokens, bootstrap.prefill_dp_rank
        )

    def _end_failed(self) -> None:
        queues = self.state.disagg
        for req in [*queues.bootstrap, *queues.prealloc, *queues.transfer]:
            transfer = _receiver(req)
            if transfer.poll() is KVPoll.FAILED:
                failure = transfer.failure or "the transfer from the prefill side failed"
                self._fail(req, failure, transfer.failure_status)

    def _fail(self, req: Req, failure: str, status: int = 500) -> None:
        if not isinstance(req.transfer, Restore):
            self._hall.transferred(req, _receiver(req).stats, failure)
        self._hall.ender.fail(req, failure, status)

    def _take_met(self) -> None:
        """Who knows its prefill server waits for room."""
        queues = self.state.disagg
        for req in [each for each in queues.bootstrap if _receiver(each).poll() >= KVPoll.WAITING_FOR_INPUT]:
            queues.bootstrap.remove(req)
            queues.prealloc.append(req)
            self._hall.met(req, rank=_receiver(req).prefill_dp_rank)

    def _take_arrived(self) -> None:
        queues = self.state.disagg
        for req in [each for each in queues.transfer if _has_arrived(each)]:
            if isinstance(req.transfer, Restore):
                queues.transfer.remove(req)
                queues.ready.append(req)
            else:
                self._arrive(req)

    def _arrive(self, req: Req) -> None:
        """All KV is in place: the request waits for the next batch."""
        state, receiver, bootstrap = self.state, _receiver(req), req.bootstrap
        assert bootstrap is not None
        aux = receiver.aux
        if aux is None or aux.room != bootstrap.room:
            found = "nothing" if aux is None else f"the data of room {aux.room}"
            self._fail(req, f"{found} came with the KV of room {bootstrap.room}")
            return
        if aux.prompt not in (None, prompt_mark(req.origin_input_ids)):
            text = f"bootstrap_room {bootstrap.room}: the KV of another prompt came; no two requests may share a room"
            self._fail(req, text, 400)
            return
        self._hall.transferred(req, receiver.stats)
        state.disagg.transfer.remove(req)
        state.disagg.ready.append(req)
        req.time_stats.wait_queue_entry = state.clock.now()
        self._hall.announce(req, len(state.disagg.ready) - 1)

    def _resume_retracted(self) -> None:
        """In their order, those whose KV is in host memory."""
        state = self.state
        queue = state.disagg.retracted
        while queue:
            req = queue[0]
            kept = req.kept_kv
            assert kept is not None
            if not kept.copy.done() or not state.cache.req_to_token_pool.available_size():
                return
            if self._budget.need(req, req.seqlen) > self._budget.have():
                return
            queue.pop(0)
            try:
                self._keeper.restore(req, kept)
            except Exception:  # whatever the device says: the prompt can be computed again
                log.exception("the KV of request %s was not kept; it is prefilled again", req.rid)
                req.kept_kv = None
                state.enqueue(req)
            else:
                state.disagg.transfer.append(req)

    def _preallocate(self) -> None:
        """Row and pages for those who know their prefill server, in their order, while there is room."""
        queue = self.state.disagg.prealloc
        while queue:
            if not self._take_room(queue[0]):
                return
            queue.pop(0)

    def _take_room(self, req: Req) -> bool:
        state = self.state
        cache, tokens = state.cache, len(req.origin_input_ids)
        if state.disagg.retracted or any(other.is_retracted for other in state.waiting_queue):
            return self._refuse(req, "retracted", tokens, cache.room())
        rows = cache.req_to_token_pool.available_size()
        if not rows:
            return self._refuse(req, "rows", 1, rows)
        match = cache.match(req.origin_input_ids, req.namespace, tokens - 1)
        with cache.held(match.node):
            need, have = self._budget.need(req, tokens, match.length), self._budget.have()
            if need > have:
                return self._refuse(req, "kv", need, have)
            cache.adopt(req, match)
        cache.alloc_extend([req], [tokens])
        req.prefix_len, req.extend_end = match.length, tokens
        self._refused = None
        self._tell_preallocated(req, need, have)
        _receiver(req).init(cache.row_slots(req)[match.length :], match.length)
        state.disagg.transfer.append(req)
        return True

    def _tell_preallocated(self, req: Req, need: int, have: int) -> None:
        bootstrap = req.bootstrap
        assert bootstrap is not None
        if self.state.trace.on:
            body = schema.DisaggPreallocated(
                rid=req.rid, room=bootstrap.room, tokens=req.extend_end, prefix_len=req.prefix_len, need=need,
                have=have,
            )  # fmt: skip
            self.state.trace.emit(body)

    def _refuse(self, req: Req, reason: str, need: int, have: int) -> bool:
        """False; told when request or reason change."""
        bootstrap = req.bootstrap
        assert bootstrap is not None
        if self._refused != (req.rid, reason):
            self._refused = (req.rid, reason)
            if self.state.trace.on:
                body = schema.DisaggPreallocRefused(
                    rid=req.rid, room=bootstrap.room, reason=reason, need=need, have=have,
                    behind=len(self.state.disagg.prealloc) - 1,
                )  # fmt: skip
                self.state.trace.emit(body)
        return False


def _receiver(req: Req) -> KVReceiver:
    return cast(KVReceiver, req.transfer)


def _has_arrived(req: Req) -> bool:
    receiver = _receiver(req)
    return receiver.poll() is KVPoll.SUCCESS and not receiver.busy
