"""The prefill side: prompts are computed here, and their KV is sent to where they are decoded.

Bootstrap queue -> waiting queue -> forward, as everywhere -> inflight queue. Pieces leave as they are computed, in
whole pages; what was cached leaves before the forward. Mirrors SGLang's PrefillBootstrapQueue and its inflight queue
(facts 12.2). Simplified: nothing is computed before the handshake. Imports: batch, disaggregation (protocol),
messages, scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.disaggregation.limits import LOOK_MS
from sgviz.disaggregation.protocol import KVAux, KVPoll, KVSender, PrefillKVManager, prompt_mark
from sgviz.disaggregation.waiting import pump_until
from sgviz.errors import BadRequest
from sgviz.messages import FinishReason, TokenizedGenerateReqInput
from sgviz.scheduler.disagg.side import Hall
from sgviz.scheduler.output_streamer import OutputStreamer


class PrefillSide:
    """Implements Side and HandOver."""

    def __init__(self, hall: Hall, manager: PrefillKVManager, streamer: OutputStreamer) -> None:
        self._hall = hall
        self._state = hall.state
        self._manager = manager
        self._streamer = streamer

    @property
    def busy(self) -> bool:
        queues = self._state.disagg
        return self._manager.busy or bool(queues.draining or queues.inflight)

    @property
    def wait_ms(self) -> int:
        return self._manager.wait_ms if self._manager.busy else LOOK_MS

    def meet(self, req: Req, message: TokenizedGenerateReqInput) -> None:
        bootstrap = self._hall.bootstrap(message)
        assert bootstrap is not None
        req.transfer = self._manager.create_sender(
            req.rid, bootstrap.room, len(req.origin_input_ids), host=bootstrap.host
        )
        req.bootstrap, req.max_new_tokens = bootstrap, 1

    def turn_away(self, message: TokenizedGenerateReqInput, why: str, status: int) -> None:
        bootstrap = self._hall.bootstrap(message)
        if bootstrap is None:
            return
        try:
            sender = self._manager.create_sender(
                message.rid, bootstrap.room, len(message.input_ids), host=bootstrap.host
            )
        except BadRequest:  # the room is another request's
            return
        sender.abort(why, status)

    def enter(self, req: Req) -> None:
        self._hall.queue(req)

    def close(self) -> None:
        self._manager.close()

    def look(self) -> None:
        state = self._state
        self._manager.pump()
        state.drain()
        self._refuse_others()
        self._end_failed()
        queues = state.disagg
        for req in [each for each in queues.bootstrap if _sender(each).poll() >= KVPoll.WAITING_FOR_INPUT]:
            queues.bootstrap.remove(req)
            self._begin(req)
        done = [req for req in queues.inflight if _sender(req).poll() is KVPoll.SUCCESS]
        for req in done:
            queues.inflight.remove(req)
            self._finish(req)
        if done:
            self._streamer.stream_output(done)

    def before_launch(self, batch: ScheduleBatch) -> None:
        """Send what was cached when a prompt came (SGLang's `maybe_send_cached_prefix_chunk`)."""
        for req in batch.reqs:
            if req.transfer is not None and req.cached_tokens > req.start_send_idx:
                self._send(req, self._whole_pages(req.cached_tokens), cached=True)

    def while_running(self, done: Callable[[], bool]) -> None:
        pump_until(self._manager, done)

    def computed(self, req: Req, end: int) -> None:
        if req.finished:
            return
        # first into the tree: its pages stay, a duplicate of them would be freed with the next plan
        self._state.cache.checkpoint(req, req.origin_input_ids[:end])
        self._send(req, self._whole_pages(end))

    def prefilled(self, req: Req) -> None:
        self._state.disagg.inflight.append(req)
        self._send(req, len(req.origin_input_ids), aux=_aux(req))

    def _begin(self, req: Req) -> None:
        """The decode side has told where the KV goes: the request may run."""
        state = self._state
        req.start_send_idx = _sender(req).decode_prefix_len
        self._hall.met(req, prefix=req.start_send_idx)
        req.time_stats.wait_queue_entry = state.clock.now()
        state.enqueue(req)
        self._hall.announce(req, len(state.waiting_queue) - 1)

    def _refuse_others(self) -> None:
        """A decode side that has more of its prompt than there is of this one came with another request."""
        for req in self._state.disagg.bootstrap:
            sender, length, bootstrap = _sender(req), len(req.origin_input_ids), req.bootstrap
            if sender.poll() is KVPoll.WAITING_FOR_INPUT and sender.decode_prefix_len > length:
                assert bootstrap is not None
                told = f"the decode side has {sender.decode_prefix_len} tokens of its prompt, this one has {length}"
                sender.abort(
                    f"bootstrap_room {bootstrap.room}: {told}; no two requests may share a room", 400
                )

    def _send(self, req: Req, end: int, *, aux: KVAux | None = None, cached: bool = False) -> None:
        sender, start = _sender(req), req.start_send_idx
        if sender.poll() is KVPoll.FAILED or (end <= start and aux is None):
            return
        slots = self._state.cache.row_slots(req)[start:end]
        req.start_send_idx = max(start, end)
        sender.send(start, slots, aux=aux, cached=cached)

    def _whole_pages(self, tokens: int) -> int:
        return tokens - tokens % self._state.cache.page_size

    def _finish(self, req: Req) -> None:
        """The decode side has everything."""
        state, sender = self._state, _sender(req)
        self._hall.transferred(req, sender.stats)
        req.finished_reason = FinishReason(type="length", length=len(req.output_ids))
        req.time_stats.completion = state.clock.now()
        if sender.busy:
            state.give_back(req, "finish")
        else:
            state.cache.release(req, req.origin_input_ids, insert=True, why="finish")
        state.running_batch.batch_is_full = False
        state.live.pop(req.rid, None)

    def _end_failed(self) -> None:
        """Those whose other side is lost or gave up, wherever they are."""
        state = self._state
        for req in list(state.live.values()):
            if req.transfer is None or req.to_finish is not None:
                continue
            sender = _sender(req)
            if sender.poll() is KVPoll.FAILED and not (req is state.chunked_req and state.chunk_aborted):
                failure = sender.failure or "the transfer to the decode side failed"
                self._hall.transferred(req, sender.stats, failure)
                self._hall.ender.fail(req, failure, sender.failure_status)


def _sender(req: Req) -> KVSender:
    return cast(KVSender, req.transfer)


def _aux(req: Req) -> KVAux:
    """What the decode side must know of a prompt that is computed."""
    given, has_output = req.input_logprobs, req.return_logprob and bool(req.output_logprobs)
    bootstrap = req.bootstrap
    assert bootstrap is not None
    return KVAux(
        room=bootstrap.room,
        first_token=req.output_ids[-1],
        cached_tokens=req.cached_tokens,
        output_logprob=req.output_logprobs[-1] if has_output else None,
        output_top_logprobs=req.output_top_logprobs[-1] if req.output_top_logprobs else [],
        output_token_ids_logprobs=req.output_token_ids_logprobs[-1] if req.output_token_ids_logprobs else [],
        input_token_logprobs=given.logprobs,
        input_top_logprobs=given.tops,
        input_token_ids_logprobs=given.token_ids,
        prompt=prompt_mark(req.origin_input_ids),
    )
