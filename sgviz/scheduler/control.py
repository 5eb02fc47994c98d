"""Control: what a running scheduler is told beside requests: pauses, weights, profiles, a slower device, its load.

Mirrors the control requests of SGLang's Scheduler. While such a message is carried out the loop goes round: weights
are loaded beside it and taken at the beginning of a turn. Imports: errors, messages, events, scheduler, worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import schema
from sgviz.messages.flow import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    PauseGenerationReqInput,
    ProfileReqOutput,
    SlowDownReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from sgviz.scheduler.intake import Outbox
from sgviz.scheduler.load import LoadMeter
from sgviz.scheduler.pause import Pauser
from sgviz.scheduler.state import SchedulerState
from sgviz.worker.protocol import Launch, NewWeights, Worker
from sgviz.worker.steps import SlowWorker, WatchedWorker

log = logging.getLogger(__name__)


class Profile(Protocol):
    """A profile of the scheduler's process, made but not begun; `sgviz.worker.profiler.Profiler` is one.

    Attributes:
        path: the file that it will be in. is_done: the forwards it was to see are over.
    """

    path: Path

    @property
    def is_done(self) -> bool: ...

    def start(self) -> None:
        """Begin it. Raises SgvizError, or RuntimeError if that cannot be."""
        ...

    def around(self, batch: ScheduleBatch, launch: Callable[[], Launch]) -> Launch:
        """`launch` the batch, and note it."""
        ...

    def stop(self) -> None:
        """End it and write the file. Raises OSError if that cannot be."""
        ...


MakeProfile = Callable[[StartProfileReqInput], Profile]


@dataclass(slots=True)
class _Update:
    """Weights that were asked for and are on their way, since `since` (ns)."""

    message: UpdateWeightFromDiskReqInput
    weights: NewWeights
    since: int


class Control:
    """Answers each message once, when it is carried out.

    Args:
        worker: the device itself. use: puts a worker (the device, or one around it) in the place of the present one.
        longest_sleep: seconds that a forward may be put off, well below what a watchdog takes for being stuck.
        make_profile: what makes a profile of this process; None: nobody can ask for one.

    Attributes:
        is_profiling: a profile is being begun or written, which may take its time.
    """

    def __init__(
        self,
        state: SchedulerState,
        worker: Worker,
        use: Callable[[Worker], None],
        pauser: Pauser,
        to_tokenizer: Outbox,
        longest_sleep: float,
        make_profile: MakeProfile | None = None,
    ) -> None:
        self._state = state
        self._device = worker
        self._use = use
        self._pauser = pauser
        self._to_tokenizer = to_tokenizer
        self._longest_sleep = longest_sleep
        self._make_profile = make_profile
        self._meter = LoadMeter(state, worker.info)
        self._update: _Update | None = None
        self._profiler: Profile | None = None
        self._last_trace = ""
        self._sleep: float | None = None
        self.is_profiling = False

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """By type of message."""
        return {
            PauseGenerationReqInput: self._pauser.pause,
            ContinueGenerationReqInput: self._pauser.go_on,
            UpdateWeightFromDiskReqInput: self._update_weights,
            StartProfileReqInput: self._start_profile,
            StopProfileReqInput: self._stop_profile,
            SlowDownReqInput: self._slow_down,
            GetLoadsReqInput: self._loads,
        }

    @property
    def waits(self) -> bool:
        """For something that no message tells of: the loop has to look."""
        return self._update is not None

    def look(self) -> None:
        """Go on with what has become ready; never waits."""
        if self._update is not None and self._update.weights.done():
            self._finish_update(self._update)
        if self._profiler is not None and self._profiler.is_done:
            self._end_profile(self._profiler)

    def close(self) -> None:
        """End what is still under way."""
        if self._profiler is not None:
            self._end_profile(self._profiler)

    # ------------------------------------------------------------ weights

    def _update_weights(self, message: UpdateWeightFromDiskReqInput) -> None:
        state = self._state
        try:
            if self._update is not None:
                raise BadRequest("other weights are being loaded already; wait for them")
            if message.flush_cache and state.pause == "in_place" and state.num_held:
                raise BadRequest(self._why_no_flush(), param="flush_cache")
            weights = self._device.load_weights(message.model_path)
        except SgvizError as error:
            self._refuse_update(message, error)
        else:
            self._update = _Update(message, weights, state.clock.now())

    def _why_no_flush(self) -> str:
        state = self._state
        ledger = state.cache.ledger()
        return (
            f"the weights were not changed: {state.num_held} paused requests hold KV of the present ones "
            f"({ledger.protected + ledger.private} tokens), so the cache cannot be flushed; pause with mode retract "
            "or abort, or give flush_cache false"
        )

    def _may_flush(self) -> bool:
        ledger = self._state.cache.ledger()
        return self._state.may_flush and not (ledger.protected or ledger.private)

    def _finish_update(self, update: _Update) -> None:
        """The weights are there, or cannot be had. Wait for who ends in a pause, with a flush for all who hold KV."""
        state, message = self._state, update.message
        if state.pause is not None and state.num_ending:
            return
        if message.flush_cache and not self._may_flush():
            if not (state.is_fully_idle or (state.pause == "in_place" and state.at_rest)):
                return
            self._update = None
            self._refuse_update(message, BadRequest(self._why_no_flush(), param="flush_cache"))
            return
        self._update = None
        try:
            update.weights.install()
        except SgvizError as error:
            self._refuse_update(message, error)
            return
        except Exception as error:
            log.exception("loading the weights of %s failed", message.model_path)
            self._refuse_update(message, SgvizError(f"loading failed: {type(error).__name__}: {error}"))
            return
        if message.flush_cache:
            state.cache.flush()
        self._tell_updated(update)

    def _tell_updated(self, update: _Update) -> None:
        state, message = self._state, update.message
        progress = {rid: len(req.output_ids) for rid, req in state.live.items()}
        if state.trace.on:
            body = schema.WeightsUpdated(
                model_path=message.model_path, weight_version=message.weight_version,
                load_ns=state.clock.now() - update.since, progress=tuple(progress.items()),
            )  # fmt: skip
            state.trace.emit(body)
        text = f"the weights are those of {message.model_path} now, version {message.weight_version!r}"
        self._to_tokenizer.send(
            UpdateWeightFromDiskReqOutput(id=message.id, success=True, message=text, progress=progress)
        )

    def _refuse_update(self, message: UpdateWeightFromDiskReqInput, error: SgvizError) -> None:
        self._to_tokenizer.send(
            UpdateWeightFromDiskReqOutput(
                id=message.id, success=False, message=error.message, status=error.status, param=error.param
            )
        )

    # ------------------------------------------------------------ profiles

    def _start_profile(self, message: StartProfileReqInput) -> None:
        try:
            if self._profiler is not None:
                raise BadRequest(f"a profile is under way already, into {self._profiler.path}; stop it first")
            if self._make_profile is None:
                raise BadRequest("this scheduler was started without a profiler")
            self.is_profiling = True
            profiler = self._make_profile(message)
            profiler.start()
        except SgvizError as error:
            self._answer_profile(message.id, error)
            return
        except RuntimeError as error:  # torch's
            self._answer_profile(message.id, SgvizError(f"the profile could not be begun: {error}"))
            return
        finally:
            self.is_profiling = False
        self._profiler = profiler
        self._last_trace = ""
        if self._state.trace.on:
            self._state.trace.emit(
                schema.ProfileStarted(path=str(profiler.path), num_steps=message.num_steps)
            )
        self._arrange()
        self._answer_profile(message.id, None, str(profiler.path))

    def _stop_profile(self, message: StopProfileReqInput) -> None:
        if self._profiler is None:
            last = f"; the last one ended by itself and is in {self._last_trace}" if self._last_trace else ""
            self._answer_profile(message.id, BadRequest(f"no profile is under way{last}"))
            return
        path = str(self._profiler.path)
        error = self._end_profile(self._profiler)
        self._last_trace = ""
        self._answer_profile(message.id, error, path)

    def _end_profile(self, profiler: Profile) -> SgvizError | None:
        """Write the file; the error, if it cannot be written, is that of whoever asked."""
        self._profiler = None
        self._arrange()
        self.is_profiling = True
        failure: SgvizError | None = None
        try:
            profiler.stop()
        except (OSError, RuntimeError) as error:
            log.error("the profile could not be written to %s: %s", profiler.path, error)
            failure = SgvizError(f"the profile could not be written to {profiler.path}: {error}")
        finally:
            self.is_profiling = False
        self._last_trace = str(profiler.path) if failure is None else ""
        if self._state.trace.on:
            why = "" if failure is None else failure.message
            self._state.trace.emit(schema.ProfileEnded(path=str(profiler.path), error=why))
        return failure

    def _answer_profile(self, name: str, error: SgvizError | None, path: str = "") -> None:
        reply = ProfileReqOutput(id=name, success=error is None, message="done", path=path)
        if error is not None:
            reply.message, reply.status, reply.param = error.message, error.status, error.param
        self._to_tokenizer.send(reply)

    # ------------------------------------------------------------ the rest

    def _slow_down(self, message: SlowDownReqInput) -> None:
        seconds = message.forward_sleep_time
        if seconds is not None and not 0 <= seconds <= self._longest_sleep:
            text = (
                f"forward_sleep_time must be null or between 0 and {self._longest_sleep:g} seconds (half of "
                f"watchdog_timeout and of health_timeout, or it would count as stuck), got {seconds:g}"
            )
            refused = ControlReqOutput(id=message.id, success=False, message=text, param="forward_sleep_time")
            self._to_tokenizer.send(refused)
            return
        if self._state.trace.on:
            self._state.trace.emit(schema.ForwardsSlowed(sleep_s=seconds or 0.0))
        self._sleep = seconds
        self._arrange()
        text = f"each forward waits {seconds:g} s" if seconds else "forwards do not wait"
        self._to_tokenizer.send(ControlReqOutput(id=message.id, success=True, message=text))

    def _loads(self, message: GetLoadsReqInput) -> None:
        self._to_tokenizer.send(GetLoadsReqOutput(id=message.id, load=self._meter.load()))

    def _arrange(self) -> None:
        """Put around the device what is asked of its forwards now."""
        worker = self._device
        if self._sleep:
            worker = SlowWorker(worker, self._sleep)
        if self._profiler is not None:
            worker = WatchedWorker(worker, self._profiler.around)
        self._use(worker)
