"""RequestTable: the live rids, and the only place where a request begins, is sent, aborted or ends.

Mirrors the `rid_to_state` of SGLang's TokenizerManager and its abort paths. What is simplified: aborting
takes exact names, of a rid or of the request that fanned out into it, never a prefix.
One asyncio loop owns a table: call from that loop's thread only. Imports: messages, channel, errors, events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sgviz.channel import Sender
from sgviz.errors import BadRequest, Unavailable
from sgviz.events.clock import Clock
from sgviz.events.schema import Reason, RequestAborted, RequestDispatched, RequestFinished
from sgviz.events.time_stats import TimeStats
from sgviz.events.tracer import Tracer
from sgviz.messages import AbortReq, FinishReason, GenerateReqInput, TokenizedGenerateReqInput
from sgviz.tokenizer_manager.state import ReqState


@dataclass(slots=True, eq=False)
class Family:
    """The states a request fanned out into, under the name the caller knows. `aborted`: why, if it was."""

    name: str
    states: list[ReqState] = field(default_factory=list)
    aborted: str | None = None


class RequestTable:
    """Who is live. A state leaves before its waiter is woken, so its rid may be used again at once."""

    def __init__(self, *, sender: Sender, trace: Tracer, clock: Clock) -> None:
        self.rid_to_state: dict[str, ReqState] = {}
        self._families: dict[str, Family] = {}
        self._sender = sender
        self._trace = trace
        self._clock = clock
        self.on_register: Callable[[ReqState], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_give_up: Callable[[ReqState], None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_empty(self) -> bool:
        """No request is live, not even between a warm-up and its copies."""
        return self._empty.is_set()

    # ------------------------------------------------------------ begin

    def open_family(self, name: str) -> Family:
        """Make `name` stand for states to come. Raises BadRequest if it is live already."""
        self._check_free(name)
        family = self._families[name] = Family(name)
        self._note_emptiness()
        return family

    def close_family(self, family: Family) -> None:
        """Forget the name; harmless if done before."""
        if self._families.get(family.name) is family:
            del self._families[family.name]
            self._note_emptiness()

    def register(
        self,
        obj: GenerateReqInput,
        event: asyncio.Event,
        families: Sequence[Family] = (),
        index: int | None = None,
    ) -> ReqState:
        """Enter a request. In a family that was aborted meanwhile it ends at once.

        Raises:
            BadRequest: its rid is live.
        """
        assert isinstance(obj.rid, str)
        self._check_free(obj.rid)
        stats = TimeStats(created=obj.received_ns or self._clock.now())
        state = ReqState(rid=obj.rid, obj=obj, event=event, stats=stats, index=index)
        self.rid_to_state[state.rid] = state
        self._note_emptiness()
        if self.on_register is not None:
            self.on_register(state)
        for family in families:
            family.states.append(state)
            if family.aborted is not None:
                self._abort(state, family.aborted)
        return state

    def dispatch(self, state: ReqState, tokenized: TokenizedGenerateReqInput) -> None:
        """Send to the scheduler, unless the request has ended meanwhile; does not wait."""
        if state.finished:
            return
        state.stats.api_server_dispatch = self._clock.now()
        if self._trace.on:  # before the send, or the scheduler's first event of the rid might be older
            self._trace.emit(RequestDispatched(rid=state.rid))
        self._sender.send(tokenized)
        state.dispatched = True

    # ------------------------------------------------------------ end

    def finish(self, state: ReqState, reason: FinishReason) -> None:
        """Take the rid out of the table for `reason`; waking is up to the caller."""
        if state.finished:
            return
        if reason.type == "abort" and state.verdict is not None:
            reason = state.verdict
        state.stats.finished = self._clock.now()
        state.finish_reason = reason
        self._remove(state)
        if self._trace.on:
            self._trace.emit(_finished(state, reason))

    def fail_all(self, reason: FinishReason) -> None:
        """End every request with `reason`, without asking the scheduler."""
        for state in list(self.rid_to_state.values()):
            self.finish(state, reason)
            state.wake()

    def fail_rank(self, rank: int, reason: FinishReason) -> int:
        """End every request that data parallel rank `rank` had with `reason`; how many there were."""
        had = [state for state in self.rid_to_state.values() if state.dp_rank == rank and state.dispatched]
        for state in had:
            self.finish(state, reason)
            state.wake()
        return len(had)

    def abort(self, name: str, why: str) -> None:
        """End the rid `name` and what the request `name` fanned out into; unknown names are harmless."""
        family = self._families.get(name)
        states = list(family.states) if family else []
        if family:
            family.aborted = why
        if name in self.rid_to_state:
            states.append(self.rid_to_state[name])
        for state in states:
            self._abort(state, why)

    def abort_all(self, why: str) -> None:
        """End every request with one message."""
        for family in self._families.values():
            family.aborted = why
        states = [state for state in self.rid_to_state.values() if not state.abort_sent]
        if any(state.dispatched for state in states):
            self._sender.send(AbortReq(abort_all=True, message=why))
        for state in states:
            self._abort(state, why, tell=False)

    def leave(self, states: Iterable[ReqState], why: str, reason: Reason | None = None) -> None:
        """Nobody waits for `states` any more: forget those not sent, abort the others.

        The latter stay until the scheduler's last message, so that their rid is not taken too early.
        """
        for state in states:
            if self.rid_to_state.get(state.rid) is state:
                self._abort(state, why, reason=reason)

    def stop_engine_side(self, state: ReqState) -> None:
        """Have the scheduler drop a request that has ended here by a fault behind the scheduler."""
        if state.dispatched and not state.abort_sent:
            state.abort_sent = True
            self._sender.send(AbortReq(rid=state.rid))

    def expire(self, state: ReqState, why: str) -> None:
        """Abort a request that took too long: it ends with 503, unless it ends by itself meanwhile."""
        state.verdict = FinishReason(
            type="abort", message=why, status_code=Unavailable.status, err_type=Unavailable.type
        )
        self._abort(state, why)

    def give_up(self, state: ReqState) -> None:
        """End a request here that was aborted and whose end the engine does not tell."""
        self.finish(state, FinishReason(type="abort", message="the engine did not end the request"))
        if self.on_give_up is not None:
            self.on_give_up(state)
        state.wake()

    async def drained(self) -> None:
        """Wait until no request is live."""
        await self._empty.wait()

    def _abort(self, state: ReqState, why: str, *, tell: bool = True, reason: Reason | None = None) -> None:
        if state.finished or state.abort_sent:
            return
        state.abort_sent = True
        if self._trace.on:
            self._trace.emit(RequestAborted(rid=state.rid, where="tokenizer", why=why, reason=reason))
        if not state.dispatched:
            self.finish(state, FinishReason(type="abort", message=why))
            state.wake()
        elif tell:
            self._sender.send(AbortReq(rid=state.rid, message=why))

    def _remove(self, state: ReqState) -> None:
        if self.rid_to_state.get(state.rid) is state:
            del self.rid_to_state[state.rid]
            self._note_emptiness()
            if self.on_end is not None:
                self.on_end()

    def _check_free(self, name: str) -> None:
        if name in self.rid_to_state or name in self._families:
            raise BadRequest(f"rid {name!r} is already in use; wait for its end or take another", param="rid")

    def _note_emptiness(self) -> None:
        if self.rid_to_state or self._families:
            self._empty.clear()
        else:
            self._empty.set()


def _finished(state: ReqState, reason: FinishReason) -> RequestFinished:
    return RequestFinished(
        rid=state.rid,
        reason=reason.type,
        matched="" if reason.matched is None else str(reason.matched),
        prompt_tokens=state.prompt_tokens,
        completion_tokens=state.completion_tokens,
        cached_tokens=state.cached_tokens,
    )
