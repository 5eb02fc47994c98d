"""ControlDesk: pauses, other weights, profiles, a slower device and the load, asked of the scheduler by callers.

Mirrors the control part of SGLang's TokenizerManager. Of several schedulers all are asked, and what they answer is one
answer; what pauses, continues and changes weights reaches them one by one. One asyncio loop owns a desk.
Imports: messages, events, errors, this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from sgviz.channel import Sender
from sgviz.errors import BadRequest, Unavailable, from_status
from sgviz.events.schema import WeightsRenamed
from sgviz.events.tracer import Tracer
from sgviz.messages.flow import (
    LOAD_FORMATS,
    PAUSE_MODES,
    Activity,
    ContinueGenerationReqInput,
    ControlReqOutput,
    FlowQuestion,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    Load,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    ProfileReqOutput,
    SlowDownReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from sgviz.messages.generate import new_rid
from sgviz.messages.parallel import ActiveRanksOutput
from sgviz.messages.workers import (
    AbortBroadcastReq,
    HoldForWeightsReq,
    PauseContinueBroadcastReq,
    ReleaseAfterWeightsReq,
    WeightsNamedReq,
)
from sgviz.tokenizer_manager.crew import Crew
from sgviz.tokenizer_manager.flow import Flow
from sgviz.tokenizer_manager.follower import ABORTED_BY_PAUSE, ABORTED_FOR_WEIGHTS
from sgviz.tokenizer_manager.merge import total_load
from sgviz.tokenizer_manager.rank_weights import RankWeights
from sgviz.tokenizer_manager.replies import Replies
from sgviz.tokenizer_manager.table import RequestTable
from sgviz.tokenizer_manager.weights import Weights

# a running scheduler answers at its next turn, which may be behind a long forward; a worker does what needs no wait
ANSWER_TIMEOUT_S = 60.0
MAX_STEPS = 1_000_000_000  # of a profile
LOAD_TIMEOUT_S = 3600.0  # of weights; a scheduler that dies meanwhile is noticed at once


class ControlDesk:
    """What callers may ask beside requests.

    Args:
        start: begins to receive, if that is not so. refusal: why nothing is taken any more, if that is so.
        crew: the tokenizer workers, to which pauses and names of weights apply as well.
    """

    def __init__(
        self,
        sender: Sender,
        replies: Replies,
        table: RequestTable,
        flow: Flow,
        weights: Weights,
        trace: Tracer,
        start: Callable[[], None],
        refusal: Callable[[], str | None],
        crew: Crew,
    ) -> None:
        self._crew = crew
        self.weights = weights
        self._sender = sender
        self._replies = replies
        self._table = table
        self._flow = flow
        self._trace = trace
        self._start = start
        self._refusal = refusal
        self._rank_weights = RankWeights(replies, replies.ranks, self._tell_aside)
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # membership only

    @property
    def is_paused(self) -> bool:
        return self._flow.mode is not None

    async def pause_generation(self, mode: PauseMode = "abort") -> int:
        """Let no new request begin; returns how many are under way when everything stands still.

        Args:
            mode: abort ends what is under way, with the text so far; retract sends it back to the queue without its
                KV, in_place keeps it where it is: both go on after `continue_generation` as if nothing had been.

        Raises:
            BadRequest: another mode, or the pause was ended before everything stood still. Unavailable: the engine is
                gone, or did not come to rest in time; then nothing is paused, unless it was before.
        """
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", param="mode")
        held: int = await self._whole(self._pause(mode))
        return held

    async def continue_generation(self) -> None:
        """End the pause; harmless if there is none."""
        await self._whole(self._continue())

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> UpdateWeightFromDiskReqOutput:
        """Run with the weights at `model_path` from now on, a model of the same shapes; returns what was done.

        Requests under way are waited for (or ended, with `abort_all_requests`), new ones wait. In a pause they stand
        still and go on with the new weights. If anything is wrong the old weights stay, whole; of several ranks those
        of all, as a rank that has taken the new ones goes back (or is set aside, if it cannot).

        Args:
            model_path: as the engine takes it. load_format: auto or safetensors.
            flush_cache: drop what the old weights computed; refused while paused requests hold some.
            weight_version: name of the new weights in answers; None: the name stays.

        Raises:
            BadRequest: they cannot be loaded, do not fit, or the cache cannot be flushed.
        """
        if load_format is not None and load_format not in LOAD_FORMATS:
            raise BadRequest(
                f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}",
                param="load_format",
            )
        question = UpdateWeightFromDiskReqInput(
            id=new_rid(),
            model_path=model_path,
            weight_version=self.weights.version if weight_version is None else weight_version,
            flush_cache=flush_cache,
        )
        reply: UpdateWeightFromDiskReqOutput = await self._whole(self._update(question, abort_all_requests))
        return reply

    async def start_profile(
        self,
        output_dir: str | None = None,
        num_steps: int | None = None,
        activities: list[Activity] | None = None,
        *,
        with_stack: bool = False,
        record_shapes: bool = False,
        profile_id: str | None = None,
    ) -> str:
        """Let torch's profiler watch the scheduler's process; returns the path of the trace to come.

        Raises:
            BadRequest: a profile is under way, or it cannot be made this way.
        """
        if num_steps is not None and not 1 <= num_steps <= MAX_STEPS:
            raise BadRequest(
                f"num_steps must be between 1 and {MAX_STEPS:,}, got {num_steps}", param="num_steps"
            )
        question = StartProfileReqInput(
            id=new_rid(), output_dir=output_dir, num_steps=num_steps,
            activities=tuple(activities) if activities else None, with_stack=with_stack,
            record_shapes=record_shapes, profile_id=profile_id,
        )  # fmt: skip
        reply = await self._ask(question)
        assert isinstance(reply, ProfileReqOutput)
        return reply.path

    async def stop_profile(self) -> str:
        """End the profile; returns the path of the trace. Raises BadRequest if none is under way."""
        reply = await self._ask(StopProfileReqInput(id=new_rid()), LOAD_TIMEOUT_S)
        assert isinstance(reply, ProfileReqOutput)
        return reply.path

    async def slow_down(self, forward_sleep_time: float | None) -> None:
        """Put off each forward by so many seconds; None: no more."""
        await self._ask(SlowDownReqInput(id=new_rid(), forward_sleep_time=forward_sleep_time))

    async def get_load(self) -> Load:
        """Of all ranks together."""
        return total_load(list((await self.get_loads()).values()))

    async def get_loads(self) -> dict[int, Load]:
        """Of each rank that lives, by its number."""
        self._start()
        self._check_alive()
        parts = await self._replies.ask_each(GetLoadsReqInput(id=new_rid()), ANSWER_TIMEOUT_S)
        return {rank: reply.load for rank, reply in parts.items() if isinstance(reply, GetLoadsReqOutput)}

    async def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> None:
        """Name the weights otherwise, without changing them.

        Requests under way are ended before that, or else go on, and their answers tell from which token on the name
        is another.
        """
        await self._whole(self._rename(new_version, abort_all_requests))

    def release(self) -> None:
        """End a pause without waiting: the engine is about to end, and what runs may do so before."""
        if self.is_paused:
            self._flow.go_on()
            self._crew.tell(PauseContinueBroadcastReq(id="", mode=None))
            with suppress(Unavailable):  # it is gone, and nobody waits for it
                self._sender.send(ContinueGenerationReqInput(id=""))

    # ------------------------------------------------------------ inside

    async def _whole(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do all of it, also when the caller stops waiting."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _pause(self, mode: PauseMode) -> int:
        self._check_alive()
        before = self._flow.mode
        self._flow.pause(mode)
        if mode == "abort":
            return await self._abort_and_wait()
        async with self._one_at_a_time:
            before = before and self._flow.mode
            self._close_again(mode)
            try:
                await self._crew.ask(PauseContinueBroadcastReq(id=new_rid(), mode=mode), ANSWER_TIMEOUT_S)
                reply = await self._ask(PauseGenerationReqInput(id=new_rid(), mode=mode))
            except Unavailable as error:
                if self._refusal() is not None or before is not None:
                    raise
                self.release()
                raise Unavailable(f"{error.message}, so nothing is paused") from None
        assert isinstance(reply, PauseGenerationReqOutput)
        return reply.requests

    def _close_again(self, mode: PauseMode) -> None:
        """When it is this pause's turn: a continue before it has opened what was closed at once."""
        self._check_alive()
        self._flow.pause(mode)

    async def _abort_and_wait(self) -> int:
        self._table.abort_all(ABORTED_BY_PAUSE)
        async with self._one_at_a_time:  # not while it waits: a continue may end it
            self._close_again("abort")
            self._table.abort_all(ABORTED_BY_PAUSE)
            all_left = self._crew.ask(PauseContinueBroadcastReq(id=new_rid(), mode="abort"))
        await self._flow.all_left("abort")
        await all_left
        self._check_alive()
        if self._flow.mode != "abort":
            now = f"a pause with mode {self._flow.mode}" if self._flow.mode else "continue_generation"
            raise BadRequest(f"the pause with mode abort was ended by {now} before every request had ended")
        return 0

    async def _continue(self) -> None:
        async with self._one_at_a_time:
            await self._ask(ContinueGenerationReqInput(id=new_rid()))
            self._flow.go_on()
            await self._crew.ask(PauseContinueBroadcastReq(id=new_rid(), mode=None), ANSWER_TIMEOUT_S)

    async def _update(
        self, question: UpdateWeightFromDiskReqInput, abort_all: bool
    ) -> UpdateWeightFromDiskReqOutput:
        self._check_alive()
        if abort_all:
            self._table.abort_all(ABORTED_FOR_WEIGHTS)
        async with self._all_held(abort_all), self._one_at_a_time:
            self._start()
            self._check_alive()
            reply = await self._rank_weights.change(question, self.weights, LOAD_TIMEOUT_S)
            for rid, tokens in reply.progress.items():
                if (state := self._table.rid_to_state.get(rid)) is not None:
                    state.weight_changes.append((tokens, question.weight_version))
            if not reply.success:
                raise from_status(reply.status, reply.message, param=reply.param)
            self.weights.model_path, self.weights.version = question.model_path, question.weight_version
            named = WeightsNamedReq(
                id=new_rid(), model_path=question.model_path, weight_version=question.weight_version,
                progress=reply.progress,
            )  # fmt: skip
            await self._crew.ask(named, ANSWER_TIMEOUT_S)
        return reply

    def _tell_aside(self) -> None:
        ranks = self._replies.ranks
        self._sender.send(ActiveRanksOutput(status=ranks.status, aside=ranks.aside))

    @asynccontextmanager
    async def _all_held(self, abort_all: bool) -> AsyncIterator[None]:
        """No request goes on or is under way, here or in a worker. The gate here, which tells of it, opens first."""
        hold = HoldForWeightsReq(id=new_rid(), abort_all=ABORTED_FOR_WEIGHTS if abort_all else "")
        try:
            async with self._flow.changing_weights(all_end=abort_all):
                await self._crew.ask(hold)
                yield
        finally:
            await self._crew.ask(ReleaseAfterWeightsReq(id=new_rid(), hold=hold.id), ANSWER_TIMEOUT_S)

    async def _rename(self, version: str, abort_all: bool) -> None:
        self._check_alive()
        if abort_all:
            await self._end_all(ABORTED_FOR_WEIGHTS)
        async with self._one_at_a_time:
            self._check_alive()
            live = [state for state in self._table.rid_to_state.values() if state.dispatched]
            progress = tuple((state.rid, state.completion_tokens) for state in live)
            if self._trace.on:
                body = WeightsRenamed(weight_version=version, before=self.weights.version, progress=progress)
                self._trace.emit(body)
                self._trace.flush()
            self.weights.version = version
            named = WeightsNamedReq(
                id=new_rid(), model_path=self.weights.model_path, weight_version=version, renamed=True
            )
            for state in live:
                state.weight_changes.append((state.completion_tokens, version))
            await self._crew.ask(named, ANSWER_TIMEOUT_S)

    async def _end_all(self, why: str) -> None:
        """Returns when all that are under way, here or in a worker, have ended for `why`."""
        ending = list(self._table.rid_to_state.values())
        self._table.abort_all(why)
        elsewhere = self._crew.ask(AbortBroadcastReq(id=new_rid(), abort_all=True, message=why))
        await self._flow.until(lambda: all(state.finished for state in ending))
        await elsewhere

    async def _ask(self, question: FlowQuestion, timeout: float | None = None) -> ControlReqOutput:
        """The scheduler's answer. Raises what it refused, Unavailable if it is gone or silent."""
        self._start()
        self._check_alive()
        reply = await self._replies.ask(question, ANSWER_TIMEOUT_S if timeout is None else timeout)
        assert isinstance(reply, ControlReqOutput)
        if not reply.success:
            raise from_status(reply.status, reply.message, param=reply.param)
        return reply

    def _check_alive(self) -> None:
        if (why := self._refusal()) is not None:
            raise Unavailable(why)
