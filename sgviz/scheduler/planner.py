"""Planner: what runs next, prefill first. Mirrors `get_next_batch_to_run` and its parts (facts 5.5, 5.6).

One turn: settle the batch of the turn before, try a prefill batch, else decode. The planner asks the
adder for verdicts, emits them, and carries out the admitted ones. Imports: batch, cache, events.
"""

from __future__ import annotations

from collections.abc import Callable

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.events import Reason, schema
from sgviz.scheduler.admission_log import AdmissionLog
from sgviz.scheduler.decode import DecodePlanner
from sgviz.scheduler.policy import PolicyView, SchedulePolicy
from sgviz.scheduler.preemption import Preemption
from sgviz.scheduler.prefill_adder import Admitted, PrefillAdder, Refused, Verdict
from sgviz.scheduler.queue_order import order_queue
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.state import SchedulerState


class Planner:
    """Plans one batch a turn.

    Attributes:
        adder: of the newest plan that looked at the queue; made in `adder_iteration`. is_scanning: it is at work.
        adder_room: KV tokens that could be had when its work was done.
        take_ready: on a decode server, takes the requests whose KV has come into the running batch.
    """

    def __init__(
        self, state: SchedulerState, policy: SchedulePolicy, decode: DecodePlanner, ender: RequestEnder
    ) -> None:
        self.policy = policy
        self._state = state
        self._decode = decode
        self._ender = ender
        self._view = PolicyView(state)
        self._log = AdmissionLog(state.trace)
        self._preemption = Preemption(state)
        self.adder: PrefillAdder | None = None
        self.adder_iteration = self.adder_room = 0
        self.is_scanning = False
        self.take_ready: Callable[[], None] | None = None

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """The next batch with rows and slots taken, or None if nothing can run."""
        self.settle()
        self.begin_prebuilt()
        batch = self._new_prefill_batch()
        if batch is None:
            batch = self._decode.next_batch()
        if batch is not None:
            self.tell_planned(batch)
        return batch

    def begin_prebuilt(self) -> None:
        """Those whose KV has come run from now on."""
        if self.take_ready is not None and self._state.disagg.ready:
            self.take_ready()

    def settle(self) -> None:
        """Put in order what the turn before has left."""
        self._settle_chunk()
        self._settle_last_batch()

    def _settle_chunk(self) -> None:
        """Drop an aborted chunked request, or put what it computed into the tree."""
        state = self._state
        req = state.chunked_req
        if req is None:
            return
        if state.chunk_aborted is not None:
            state.chunked_req = None
            self._ender.drop(req, "chunk", state.chunk_aborted, req.to_finish)
            state.chunk_aborted = None
        elif req.extend_end > req.prefix_len:  # it was continued
            state.cache.checkpoint(req, req.fill_ids()[: req.extend_end])
            req.prefix_len = req.extend_end

    def _settle_last_batch(self) -> None:
        """Requests whose prefill is done start decoding; finished ones leave."""
        state = self._state
        running, last = state.running_batch, state.last_batch
        if last is not None and last.forward_mode.is_extend:
            before = len(last)
            chunked = last.chunked_req
            last.filter_batch(
                lambda req: (
                    not req.finished
                    and req is not chunked
                    and req is not state.chunked_req
                    and req.transfer is None
                )  # with a transfer: decoded on another server
            )
            if len(last) < before:
                running.batch_is_full = False
            running.merge_batch(last)
        state.last_batch = None
        before = len(running)
        running.filter_batch(lambda req: not req.finished)
        if len(running) < before:
            running.batch_is_full = False

    def _new_prefill_batch(self) -> ScheduleBatch | None:
        state = self._state
        running = state.running_batch
        priorities = state.limits.priorities
        if running.is_empty or priorities.enabled:  # a newcomer may stand before the one that did not fit
            running.batch_is_full = False
        if (running.batch_is_full or not state.waiting_queue) and state.chunked_req is None:
            return None
        slots = self._free_slots()
        if slots <= 0 and state.chunked_req is None and not priorities.preempts:
            running.batch_is_full = True
            self._refuse_for_slots()
            return None
        self._order_queue()
        adder = self._scan(slots)
        if not adder.can_run_list:
            return None
        return self._form(adder)

    def _order_queue(self) -> None:
        state = self._state
        state.waiting_queue = order_queue(
            state.waiting_queue, self.policy, self._view, state.trace, state.limits.priorities
        )

    def _free_slots(self) -> int:
        """How many requests this batch may hold: running slots and rows (the chunked one has its row)."""
        state = self._state
        held = 1 if state.chunked_req is not None else 0
        rows = state.cache.req_to_token_pool.available_size() + held
        return min(state.limits.max_running_requests - len(state.running_batch), rows)

    def _scan(self, slots: int) -> PrefillAdder:
        """Continue the chunked prompt, then try the queue in order until a verdict says stop."""
        state = self._state
        mixed = len(state.running_batch) if self._mixes() else 0
        adder = PrefillAdder(
            state.cache,
            state.limits,
            state.running_batch.reqs,
            state.ratio.current,
            mixed_decode_tokens=mixed,
        )
        self.adder, self.adder_iteration, self.is_scanning = adder, state.trace.iteration, True
        stop: Reason | None = None
        queue = tuple(state.waiting_queue)  # who is preempted goes behind it
        self._preemption.begin()
        if queue and self._preemption.chunk_makes_way(adder, queue[0], slots):
            slots = self._free_slots()
        if state.chunked_req is not None:
            verdict = adder.add_chunked_req(state.chunked_req)
            self._log.verdict(verdict)
            stop = verdict.next if isinstance(verdict, Admitted) else verdict.reason
        self._try_queue(adder, queue, stop, slots)
        self.is_scanning, self.adder_room = False, state.cache.room()
        return adder

    def _try_queue(
        self, adder: PrefillAdder, queue: tuple[Req, ...], stop: Reason | None, slots: int
    ) -> None:
        """Add to the batch in the order of the queue until a verdict says stop; `stop`: the chunked prompt's said it.

        Requests of the other kind (for tokens, for vectors) than the batch's first are passed over.
        """
        state = self._state
        # who is passed over is the first of the next batch; a chunk that passes over the first might do so for ever
        may_pass = not queue or not _is_other_kind(adder, queue[0])
        passed: list[Req] = []
        for position, req in enumerate(queue):
            if stop is None and _is_other_kind(adder, req):
                if may_pass:
                    passed.append(req)
                    continue
                stop = Reason.OTHER_KIND
            if stop is None and len(adder.can_run_list) >= slots:
                state.running_batch.batch_is_full = True
                stop = self._slot_reason()
            if stop is None and self._preemption.goes_behind(req):
                stop = Reason.PRIORITY
            taken = self._take(adder, req, stop, slots)
            if isinstance(taken, Admitted):
                stop, slots = taken.next, self._free_slots()
                continue
            stop = taken
            first = passed[0].rid if passed else ""
            self._log.scan_stopped(req.rid, stop, len(queue) - position - 1, first)
            break
        else:
            if passed:
                self._log.scan_stopped(passed[0].rid, Reason.OTHER_KIND, len(passed) - 1)
        if stop is Reason.KV:
            state.running_batch.batch_is_full = bool(adder.can_run_list) or len(state.running_batch) > 0
        if passed:  # for them there may be room; the next plan tries
            state.running_batch.batch_is_full = False

    def _take(self, adder: PrefillAdder, req: Req, stop: Reason | None, slots: int) -> Admitted | Reason:
        """`req` into the batch, if it must be and can be by preemption; or why not (`stop`, where that is known)."""
        if stop is None:
            verdict = self._try(adder, req)
            if isinstance(verdict, Admitted):
                return verdict
            stop = verdict.reason
        if not self._makes_way(adder, req, stop, slots):
            return stop
        verdict = self._try(adder, req)
        return verdict if isinstance(verdict, Admitted) else verdict.reason

    def _makes_way(self, adder: PrefillAdder, req: Req, stop: Reason, slots: int) -> bool:
        """Whether running requests of a lower priority were sent back for `req`, so that it can be taken now."""
        # decoding requests that ride along may leave no page of the chunk budget
        by_riders = stop is Reason.CHUNK_BUDGET and adder.mixed_decode_tokens and not adder.can_run_list
        if stop not in (Reason.KV, Reason.RUNNING_SLOTS, Reason.ROWS) and not by_riders:
            return False
        if _is_other_kind(adder, req):
            return False
        return self._preemption.make_way(adder, req, slots)

    def _try(self, adder: PrefillAdder, req: Req) -> Verdict:
        """The adder's verdict on one candidate, told."""
        state = self._state
        limit = req.max_prefix_len
        match = state.cache.match(req.fill_ids(), req.namespace, limit)
        verdict = adder.add_one_req(req, match)
        if isinstance(verdict, Admitted):
            self._log.matched(req, match, limit)
        self._log.verdict(verdict)
        return verdict

    def _form(self, adder: PrefillAdder) -> ScheduleBatch:
        """Turn the adder's list into a batch with rows and slots."""
        state = self._state
        admitted = set(map(id, adder.can_run_list))  # membership only, never iterated
        state.waiting_queue = [req for req in state.waiting_queue if id(req) not in admitted]
        if state.chunked_req is None or state.chunked_req in adder.can_run_list:
            state.chunked_req = adder.new_chunked_req
        now = state.clock.now()
        for req in adder.can_run_list:
            self._enter_forward(req, now)
        pool, chunked = state.cache.req_to_token_pool, adder.new_chunked_req
        batch = ScheduleBatch(pool, list(adder.can_run_list), chunked_req=chunked)
        batch.prepare_for_extend(state.cache, state.take_bid())
        if self._mixes() and not batch.is_embedding and self._decode.can_ride_along():
            batch.mix_with_running(state.running_batch, state.cache)
            state.running_batch = ScheduleBatch(pool)
        return batch

    def _enter_forward(self, req: Req, now: int) -> None:
        stats = req.time_stats
        if stats.wait_queue_entry and not req.kv.req_pool_idx:
            stats.queue_ns += now - (req.requeued_ns or stats.wait_queue_entry)
        stats.forward_entry = stats.forward_entry or now
        if not req.counted_cached and not req.is_retracted:
            req.cached_tokens = req.prefix_len
            self._state.prompt_ct += len(req.origin_input_ids)
            self._state.cached_ct += req.prefix_len
        req.counted_cached = True
        req.is_retracted = False

    def _mixes(self) -> bool:
        """Whether decoding requests ride along with this prefill batch."""
        limits = self._state.limits
        running = self._state.running_batch
        return (
            limits.enable_mixed_chunk
            and limits.chunked_prefill_size is not None
            and len(running) > 0
            and len(running) < limits.chunked_prefill_size
            and not running.return_logprob
        )

    def _refuse_for_slots(self) -> None:
        """Tell who is first in line, by the policy, for want of a slot or row."""
        self._order_queue()
        state = self._state
        req, reason = state.waiting_queue[0], self._slot_reason()
        limit = state.limits.max_running_requests
        have = 0 if reason is Reason.RUNNING_SLOTS else state.cache.req_to_token_pool.available_size()
        need = len(state.running_batch) + 1 if reason is Reason.RUNNING_SLOTS else 1
        holders = tuple((other.rid, 1) for other in state.running_batch.reqs[:8])
        self._log.verdict(
            Refused(req, reason, need, limit if reason is Reason.RUNNING_SLOTS else have, holders)
        )
        self._log.scan_stopped(req.rid, reason, len(state.waiting_queue) - 1)

    def _slot_reason(self) -> Reason:
        state = self._state
        full = len(state.running_batch) >= state.limits.max_running_requests
        rows = state.cache.req_to_token_pool.available_size()
        return Reason.RUNNING_SLOTS if full or rows > 0 else Reason.ROWS

    def tell_planned(self, batch: ScheduleBatch) -> None:
        """The batch is fixed."""
        trace = self._state.trace
        if not trace.on:
            return
        cache = self._state.cache
        trace.emit(
            schema.BatchPlanned(
                bid=batch.bid,
                mode=batch.forward_mode.value,
                rids=tuple([req.rid for req in batch.reqs]),
                extend_lens=tuple(batch.extend_lens),
                prefix_lens=tuple(batch.prefix_lens),
                running=len(self._state.running_batch),
                waiting=len(self._state.waiting_queue),
                kv_free=cache.available_size(),
                kv_evictable=cache.evictable_size(),
                kv_protected=cache.protected_size(),
                new_token_ratio=self._state.ratio.current,
            )
        )


def _is_other_kind(adder: PrefillAdder, req: Req) -> bool:
    """Whether `req` is for vectors and the batch for tokens, or the reverse."""
    return bool(adder.can_run_list) and adder.can_run_list[0].is_embedding != req.is_embedding
