"""Follower: what the main process orders is done in a tokenizer worker, with the requests of this worker.

Mirrors what SGLang's TokenizerWorker does with a PauseContinueBroadcastReq; the other orders have no counterpart.
One asyncio loop owns it. Imports: messages, events, this folder.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from sgviz.events.schema import WeightsRenamed
from sgviz.events.tracer import Tracer
from sgviz.messages.workers import (
    AbortBroadcastReq,
    HoldForWeightsReq,
    PauseContinueBroadcastReq,
    ReleaseAfterWeightsReq,
    WeightsNamedReq,
)
from sgviz.tokenizer_manager.flow import Flow
from sgviz.tokenizer_manager.table import RequestTable
from sgviz.tokenizer_manager.weights import Weights

ABORTED_BY_PAUSE = "the request was aborted: generation is paused"
ABORTED_FOR_WEIGHTS = "the request was aborted: the weights are being replaced"
Obeyed = (
    PauseContinueBroadcastReq
    | HoldForWeightsReq
    | ReleaseAfterWeightsReq
    | WeightsNamedReq
    | AbortBroadcastReq
)


class Follower:
    """Holds, ends and names as it is told."""

    def __init__(self, table: RequestTable, flow: Flow, weights: Weights, trace: Tracer) -> None:
        self._table = table
        self._flow = flow
        self._weights = weights
        self._trace = trace
        self._holds: dict[str, AsyncExitStack] = {}

    async def do(self, order: Obeyed) -> None:
        """Returns when it is done."""
        match order:
            case PauseContinueBroadcastReq():
                await self._pause_or_continue(order)
            case HoldForWeightsReq():
                await self._hold(order)
            case ReleaseAfterWeightsReq():
                await self._release(order.hold)
            case WeightsNamedReq():
                self._name(order)
            case AbortBroadcastReq():
                await self._abort(order)

    def release(self) -> None:
        """End a pause: the engine is about to end, and what waits may run before."""
        self._flow.go_on()

    async def _pause_or_continue(self, order: PauseContinueBroadcastReq) -> None:
        if order.mode is None:
            self._flow.go_on()
            return
        self._flow.pause(order.mode)
        if order.mode == "abort":
            self._table.abort_all(ABORTED_BY_PAUSE)
            await self._flow.all_left(order.mode)

    async def _hold(self, order: HoldForWeightsReq) -> None:
        if order.abort_all:
            self._table.abort_all(order.abort_all)
        hold = self._holds[order.id] = AsyncExitStack()
        await hold.enter_async_context(self._flow.changing_weights(all_end=bool(order.abort_all)))
        if order.id not in self._holds:  # released while it waited
            await hold.aclose()

    async def _release(self, name: str) -> None:
        hold = self._holds.pop(name, None)
        if hold is not None:  # one that the engine's end kept from coming has nothing to release
            await hold.aclose()

    def _name(self, order: WeightsNamedReq) -> None:
        progress = self._progress(order) if order.renamed else order.progress
        self._weights.model_path, self._weights.version = order.model_path, order.weight_version
        for rid, tokens in progress.items():
            if (state := self._table.rid_to_state.get(rid)) is not None:
                state.weight_changes.append((tokens, order.weight_version))

    def _progress(self, order: WeightsNamedReq) -> dict[str, int]:
        """How far the requests here are at the change of the name; it is told where there are any."""
        states = self._table.rid_to_state.values()
        progress = {state.rid: state.completion_tokens for state in states if state.dispatched}
        if progress and self._trace.on:
            self._trace.emit(
                WeightsRenamed(
                    weight_version=order.weight_version,
                    before=self._weights.version,
                    progress=tuple(progress.items()),
                    of_worker=True,
                )
            )
        return progress

    async def _abort(self, order: AbortBroadcastReq) -> None:
        ending = list(self._table.rid_to_state.values())
        if order.abort_all:
            self._table.abort_all(order.message)
            if order.id:
                await self._flow.until(lambda: all(state.finished for state in ending))
        elif order.rid:
            self._table.abort(order.rid, order.message)
