"""Stage: the components of a virtual run, wired up, and the loop that gives each its turn.

Imports: all engine rooms, recording (a bridge may), virtual.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec

from sgviz.config import Settings
from sgviz.detokenizer_manager import DetokenizerManager
from sgviz.errors import SgvizError
from sgviz.events import BufferSink, Event, Sink, Tracer, WallClock, schema
from sgviz.events.tracer import FLUSH_EVERY_NS
from sgviz.grammar import make_compiler
from sgviz.messages import ToDetokenizer, ToScheduler, ToTokenizer
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer
from sgviz.reasoning import marks_of
from sgviz.recording import ClockAnchor, Header, Recording
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.scheduler.scheduler import Scheduler
from sgviz.scheduler.stops import Stop
from sgviz.tokenizer_manager import Limits, TokenizerManager
from sgviz.virtual.actors import Actor, DetokenizerActor, OneThread, Output, SteppedLoop, TokenizerActor
from sgviz.virtual.arrival import AfterFinish, Arrival, Prompter
from sgviz.virtual.charging import ChargingWorker, charge_next
from sgviz.virtual.host import ActorClock, Host, HostModel
from sgviz.virtual.wire import HandedIn, Unread, Wire, WireSender
from sgviz.worker.protocol import Worker
from sgviz.worker.sim.build import make_sim_worker
from sgviz.worker.sim.cost_model import CostModel
from sgviz.worker.sim.text_ids import text_ids

ORIGIN_NS = 1_000_000_000  # a stamp of 0 means "not reached", so time begins later
COMPONENTS = ("tokenizer_manager", "scheduler", "detokenizer")
MODE = "virtual"


class Stage:
    """One run. `add` arrivals, `run`, `close`; then `recording`, `outputs`, `failures`."""

    def __init__(
        self,
        settings: Settings,
        host: Host,
        policy: SchedulePolicy | None,
        cost: CostModel | None,
        after: AfterFinish | None,
    ) -> None:
        self._settings, self._host = settings, host
        self._model = host if isinstance(host, HostModel) else None
        self._clocks = {name: host.clock(ORIGIN_NS) for name in COMPONENTS}
        self._events: list[Event] = []
        self._tracers: list[Tracer] = []
        self._flushed_ns = 0
        folder = resolve_model(settings.model.tokenizer_path or settings.model.model_path)
        self._tokenizer = Tokenizer.load(folder)
        self._to_scheduler: Wire[ToScheduler] = Wire(ToScheduler)
        self._to_detokenizer: Wire[ToDetokenizer] = Wire(ToDetokenizer)
        self._to_tokenizer: Wire[ToTokenizer] = Wire(ToTokenizer)
        self._scheduler = self._make_scheduler(policy, cost)
        self._anchor = WallClock.anchor()
        self._tell_started()
        self._tokenizing = self._make_tokenizer(after)
        self._beside: tuple[Actor, ...] = (self._tokenizing, self._make_detokenizer())

    # ------------------------------------------------------------ run

    def add(self, arrivals: Iterable[Arrival]) -> None:
        self._tokenizing.add(arrivals)

    def run(self) -> None:
        """Until nothing is left to come. SgvizError if requests are alive then: a fault of the scheduler."""
        clock, scheduler = self._clocks["scheduler"], self._scheduler
        loop = scheduler.event_loop()
        clock.resume()
        for stop in loop:
            if stop is Stop.PROCESSED:
                self._flush_if_due(scheduler.state.trace)
            if self._model is not None:
                charge_next(self._model, clock, scheduler, stop)
            if stop is Stop.IDLE and not self._jump():
                break
        clock.pause()
        for trace in self._tracers:
            trace.flush()
        if scheduler.state.live:
            rids = list(scheduler.state.live)
            raise SgvizError(
                f"nothing is left to come, but {len(rids)} requests never ended, {rids[0]} among them"
            )

    def _flush_if_due(self, trace: Tracer) -> None:
        """As `Tracer.flush_if_due`, in virtual time."""
        now = trace.clock.now()
        if now - self._flushed_ns >= FLUSH_EVERY_NS:
            self._flushed_ns = now
            trace.flush()

    def _jump(self) -> bool:
        """Idle: let the others work until there is a message, and wait for it; False when there will be none."""
        clock = self._clocks["scheduler"]
        clock.pause()
        while (at := self._to_scheduler.first_at) is None or self._earlier(at):
            if not self._step_beside(None):
                return at is not None
        clock.advance_to(at)
        clock.resume()
        return True

    def _earlier(self, at: int) -> bool:
        """Somebody beside could still send something that arrives before `at`."""
        return any((start := actor.next_at()) is not None and start < at for actor in self._beside)

    def _settle(self, until: int) -> None:
        """The others do all that they could have begun by `until`."""
        while self._step_beside(until):
            pass

    def _step_beside(self, until: int | None) -> bool:
        """The one who can begin first takes one thing; False if nobody can (by `until`)."""
        first: Actor | None = None
        first_at = 0
        for actor in self._beside:
            at = actor.next_at()
            if at is not None and (until is None or at <= until) and (first is None or at < first_at):
                first, first_at = actor, at
        if first is None:
            return False
        first.step()
        return True

    def drain(self, limit: int = 1024) -> list[ToScheduler]:
        """The scheduler's inbox: what has arrived by its time, after the others have caught up."""
        clock = self._clocks["scheduler"]
        clock.pause()
        now = clock.now()
        self._settle(now)
        clock.resume()
        return self._to_scheduler.take_until(now, limit)

    def wait(self, timeout_ms: int) -> bool:
        """Of the inbox; the loop is advanced by hand, so nobody waits here."""
        return False

    def close(self) -> None:
        """End the worker and the asyncio loop."""
        self._scheduler.worker.close()
        self._tokenizing.close()

    # ------------------------------------------------------------ results

    @property
    def outputs(self) -> dict[str, Output]:
        return self._tokenizing.outputs

    @property
    def failures(self) -> dict[str, SgvizError]:
        return self._tokenizing.failures

    @property
    def elapsed_ns(self) -> int:
        """From the start to the last thing that somebody did."""
        return max(clock.now() for clock in self._clocks.values()) - ORIGIN_NS

    def recording(self) -> Recording:
        """The events in the order of virtual time."""
        unix_ns, _ = self._anchor
        anchors = tuple(
            ClockAnchor(component=name, pid=os.getpid(), unix_ns=unix_ns, monotonic_ns=ORIGIN_NS)
            for name in COMPONENTS
        )
        settings = {**self._settings.public(), "mode": MODE, "host": self._host.label}
        self._events.sort(key=lambda event: event.sort_key)
        header = Header(clock=MODE, settings=settings, anchors=anchors)
        return Recording(self._events, header, source="virtual run")

    # ------------------------------------------------------------ make

    def _make_scheduler(self, policy: SchedulePolicy | None, cost: CostModel | None) -> Scheduler:
        clock = self._clocks["scheduler"]
        worker: Worker = make_sim_worker(self._settings, timer=_SchedulersTimer(clock), cost=cost)
        if self._model is not None:
            worker = ChargingWorker(worker, clock, self._model)
        return Scheduler(
            self._settings,
            worker,
            inbox=self,
            to_tokenizer=self._sender(self._to_tokenizer, clock),
            to_detokenizer=self._sender(self._to_detokenizer, clock),
            decode=self._tokenizer.decode,
            grammars=make_compiler(
                self._settings.grammar,
                self._tokenizer,
                clock,
                vocab_size=worker.info.vocab_size,
                eos_token_ids=worker.info.eos_token_ids,
                marks=marks_of(self._settings.serve.reasoning_parser),
                inline=True,
            ),
            trace=self._tracer("scheduler"),
            policy=policy,
        )

    def _make_tokenizer(self, after: AfterFinish | None) -> TokenizerActor:
        clock, info = self._clocks["tokenizer_manager"], self._scheduler.worker.info
        of_scheduler = self._scheduler.state.limits
        sender = self._sender(self._to_scheduler, clock)
        loop = SteppedLoop()
        results: HandedIn[ToTokenizer] = HandedIn()
        limits = Limits(
            context_len=info.context_len,
            max_req_len=of_scheduler.max_req_len,
            max_req_input_len=of_scheduler.max_req_input_len,
            max_total_num_tokens=of_scheduler.max_total_num_tokens,
            page_size=of_scheduler.page_size,
            vocab_size=info.vocab_size,
        )
        manager = TokenizerManager(
            codec=self._tokenizer,
            sender=sender,
            receiver=results,
            trace=self._tracer("tokenizer_manager"),
            limits=limits,
            clock=clock,
            unix_offset_ns=self._anchor[0] - ORIGIN_NS,
        )
        return TokenizerActor(
            loop=loop,
            manager=manager,
            results=results,
            sender=sender,
            inbox=self._to_tokenizer,
            clock=clock,
            origin_ns=ORIGIN_NS,
            prompter=Prompter(self._tokenizer, text_ids(self._tokenizer)),
            model=self._model,
            after=after,
        )

    def _make_detokenizer(self) -> DetokenizerActor:
        clock = self._clocks["detokenizer"]
        outbox = self._sender(self._to_tokenizer, clock)
        manager = DetokenizerManager(
            OneThread(self._tokenizer), Unread(), outbox, self._tracer("detokenizer"), clock
        )
        return DetokenizerActor(manager, self._to_detokenizer, clock, self._model)

    def _sender(self, wire: Wire[Any], clock: ActorClock) -> WireSender:
        return WireSender(wire, clock, self._host)

    def _tracer(self, component: str) -> Tracer:
        off = self._settings.observe.disable_events
        trace = Tracer(component, None if off else self._sink(component), self._clocks[component])
        self._tracers.append(trace)
        return trace

    def _sink(self, component: str) -> Sink:
        """Where the scheduler's and the detokenizer's events are encoded, as they would be for the main process."""
        if component == "tokenizer_manager" or self._model is not None:
            return _ListSink(self._events)
        encode, clock = msgspec.msgpack.Encoder().encode, self._clocks[component]

        def send(events: list[Event]) -> bool:
            encode(events)
            clock.spend(self._host.send_ns)
            self._events.extend(events)
            return True

        return BufferSink(send)

    def _tell_started(self) -> None:
        """The first events: the components, and the sizes of the engine."""
        trace = self._scheduler.state.trace
        if not trace.on:
            return
        state, info = self._scheduler.state, self._scheduler.worker.info
        for component in COMPONENTS:
            trace.emit(
                schema.ProcessStarted(
                    component=component,
                    pid=os.getpid(),
                    mode=MODE,
                    unix_ns=self._anchor[0],
                    monotonic_ns=ORIGIN_NS,
                )
            )
        trace.emit(
            schema.EngineConfigured(
                settings=self._settings.public(),
                model=info.model,
                max_total_num_tokens=info.max_total_num_tokens,
                page_size=self._settings.cache.page_size,
                max_running_requests=state.limits.max_running_requests,
                context_len=info.context_len,
                rows=state.limits.max_running_requests,
            )
        )


class _ListSink:
    """Keeps every event."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def put(self, event: Event) -> None:
        self._events.append(event)

    def flush(self) -> None:
        """Nothing is buffered."""


class _SchedulersTimer:
    """The device's time is the scheduler's: who waits for a forward moves on to its end."""

    def __init__(self, clock: ActorClock) -> None:
        self._clock = clock

    def now(self) -> int:
        return self._clock.now()

    def wait_until(self, ns: int) -> None:
        self._clock.advance_to(ns)
