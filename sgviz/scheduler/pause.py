"""Pauser: no batch is planned while generation is paused, and what runs stands still or goes back to the queue.

Mirrors `pause_generation` and `continue_generation` of SGLang's Scheduler (facts 5.13). Beyond it: the answer comes
when nothing runs any more, and a request that is aborted during a pause ends at once. Mode abort is the
TokenizerManager's. Imports: batch, cache, messages, events, scheduler.
"""

from __future__ import annotations

from sgviz.events import schema
from sgviz.messages.flow import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
)
from sgviz.scheduler.disagg.kept import recompute_kept
from sgviz.scheduler.intake import Outbox
from sgviz.scheduler.planner import Planner
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.retraction import send_back
from sgviz.scheduler.state import SchedulerState

OVERTAKEN = "generation was continued before everything stood still, so nothing is paused"


class Pauser:
    """Holds and lets go the planning of one scheduler."""

    def __init__(
        self,
        state: SchedulerState,
        planner: Planner,
        ender: RequestEnder,
        to_tokenizer: Outbox,
    ) -> None:
        self._state = state
        self._planner = planner
        self._ender = ender
        self._to_tokenizer = to_tokenizer
        self._since = 0
        self._unanswered: list[str] = []

    def pause(self, message: PauseGenerationReqInput) -> None:
        """From now on; answered when the results under way are in. In another mode when paused: that one then."""
        state = self._state
        self._unanswered.append(message.id)
        if state.pause == message.mode:
            return
        self._tell_continued()
        state.pause, self._since = message.mode, state.clock.now()
        if state.trace.on:
            state.trace.emit(schema.GenerationPaused(mode=message.mode, requests=len(state.live)))

    def go_on(self, message: ContinueGenerationReqInput) -> None:
        """Plan again. A pause that has not come to rest will not: whoever waits for that is told so."""
        self._tell_continued()
        self._state.pause = None
        self._answer(OVERTAKEN)
        self._to_tokenizer.send(ControlReqOutput(id=message.id, success=True, message="generation continues"))

    def holds(self) -> bool:
        """Whether no batch may be planned in this turn; if so, puts in order what has come to rest."""
        state = self._state
        if state.pause is None:
            return False
        if not state.pending_results:
            self._planner.settle()
            self._end_aborted()
            if state.pause == "retract":
                self._retract_all()
            self._answer()
        return True

    def _answer(self, failure: str = "") -> None:
        for name in self._unanswered:
            reply = PauseGenerationReqOutput(
                id=name,
                success=not failure,
                message=failure or f"generation is paused (mode {self._state.pause})",
                requests=0 if failure else len(self._state.live),
            )
            self._to_tokenizer.send(reply)
        self._unanswered.clear()

    def _tell_continued(self) -> None:
        state = self._state
        if state.pause is not None and state.trace.on:
            state.trace.emit(schema.GenerationContinued(mode=state.pause, since_ns=self._since))

    def _end_aborted(self) -> None:
        """Those whose abort would wait for their next forward."""
        running = self._state.running_batch
        for req in running.reqs:
            if req.to_finish is not None and not req.finished:
                self._ender.drop(req, "running", req.to_finish.message or "", req.to_finish)
        running.filter_batch(lambda req: not req.finished)

    def _retract_all(self) -> None:
        """Everybody who holds KV gives it up and waits, those that run in their order, then the prompt being cut."""
        state = self._state
        self._planner.begin_prebuilt()
        recompute_kept(state)
        held = list(state.running_batch.reqs)
        if state.chunked_req is not None:
            held.append(state.chunked_req)
        ratio = state.ratio.current
        for req in held:
            told = schema.RequestRetracted(
                rid=req.rid, output_tokens=len(req.output_ids), need=0, have=0, ratio_before=ratio,
                ratio_after=ratio, paused=True,
            )  # fmt: skip
            send_back(state, req, told)
        state.running_batch.reqs = []
        state.running_batch.batch_is_full = False
        state.chunked_req = None
