"""Gate: parks the scheduler's thread at stops and events, does a debugger's commands there, and lets it go again.

While parked the thread itself reads the inbox: commands are done, questions about the state and health probes
answered, all else is kept in order. A debugger that gives no sign of life within its lease is taken for gone: the
scheduler runs on. SGLang has no counterpart. Imports: messages, events, scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from sgviz.errors import BadRequest, NotFound, SgvizError, Unavailable
from sgviz.events import Event, NullSink, Sink
from sgviz.events.schema import LoopResumed
from sgviz.messages import (
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sgviz.messages.debug import (
    AddBreakpoint,
    Attach,
    DebugReq,
    DebugReqOutput,
    DebugStatus,
    DebugView,
    Detach,
    Forget,
    Look,
    Pause,
    RemoveBreakpoint,
    Renew,
    Resume,
    SetLimits,
    Where,
)
from sgviz.messages.rids import HEALTH_CHECK_PREFIX
from sgviz.scheduler.gate.host import DebugHost
from sgviz.scheduler.gate.inbox import GatedInbox, Source
from sgviz.scheduler.gate.limits import LimitChanges
from sgviz.scheduler.gate.predicate import compiled
from sgviz.scheduler.gate.session import NS_PER_S, Goal, Session, goal_of
from sgviz.scheduler.gate.views import Viewer
from sgviz.scheduler.intake import internal_state
from sgviz.scheduler.planner import Planner
from sgviz.scheduler.state import SchedulerState
from sgviz.scheduler.stops import Stop

log = logging.getLogger(__name__)


class Outbox(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


class BreakpointSink:
    """In front of the tracer's sink while a debugger is attached: passes every event on, then may park right there."""

    def __init__(self, inner: Sink, seen: Callable[[Event], None]) -> None:
        self.inner = inner
        self._seen = seen

    def put(self, event: Event) -> None:
        self.inner.put(event)
        self._seen(event)

    def flush(self) -> None:
        self.inner.flush()


class Gate:
    """Belongs to one scheduler and is used by its thread alone; `parked` may be read from others.

    Args:
        source: the scheduler's messages; it reads `inbox` in its place.
        to_tokenizer: for answers and news of the status. to_detokenizer: for answers that go the long way.
        seed: of policies that draw.
    """

    def __init__(
        self,
        state: SchedulerState,
        source: Source,
        to_tokenizer: Outbox,
        to_detokenizer: Outbox,
        host: DebugHost,
        seed: int,
    ) -> None:
        self.inbox = GatedInbox(source, self.command, self._in_a_hurry)
        self.parked = False
        self.awake = False  # somebody is attached, or a change of limits waits for a stop
        self._state, self._host, self._seed = state, host, seed
        self._to_tokenizer, self._to_detokenizer = to_tokenizer, to_detokenizer
        self._session: Session | None = None
        self._sink: BreakpointSink | None = None
        self._where: Where | None = None
        self._opening = False  # the event that tells so is no place to park
        self._stop_no = 0
        self._note = ""
        self._doing: Mapping[type, Callable[[Session, Any], DebugReqOutput | None]] = MappingProxyType(
            {
                Resume: self._resume,
                Pause: self._pause,
                Forget: self._forget,
                AddBreakpoint: self._add,
                RemoveBreakpoint: self._remove,
                Look: self._look,
                SetLimits: self._set_limits,
                Renew: lambda session, command: None,
                Detach: lambda session, command: self._let_go("the debugger let go"),
            }
        )

    def bind(self, planner: Planner) -> None:
        """The planner, which is made after the inbox that it does not know."""
        self._changes = LimitChanges(self._state, planner, self._seed)
        self._viewer = Viewer(self._state, planner, self._changes)

    # ------------------------------------------------------------ parking

    def at(self, stop: Stop) -> None:
        """The loop is at a named stop: park if that is wanted. To be called while `awake`."""
        self._changes.apply()  # those asked for at an event
        session = self._session
        goal = session.goal if session is not None and not self._is_expired(session) else None
        if goal is not None and goal.reached_at(self._state.trace.iteration):
            self._park(goal.why, stop=stop)
        self._changes.apply()
        self.awake = self._session is not None or self._changes.unfinished

    def _seen(self, event: Event) -> None:
        """An event of the scheduler went by: park right there if a breakpoint says so."""
        session = self._session
        if session is None or self.parked or self._opening:
            return
        why = session.hit(event)
        if why and not self._is_expired(session):
            self._park(why, event=event)

    def _park(self, why: str, *, stop: Stop | None = None, event: Event | None = None) -> None:
        """Stand still until the debugger resumes, lets go, or is gone."""
        state, session = self._state, self._session
        assert session is not None
        session.goal = None
        since = state.clock.now()
        self._stop_no += 1
        self._where = Where(
            stop_no=self._stop_no,
            why=why,
            stop=stop.value if stop is not None else "",
            iteration=state.trace.iteration,
            seq=event.seq if event is not None else state.trace.seq,
            event=event,
            decided=session.tell(stop, event),
        )
        self.parked = True
        state.trace.flush()  # whoever looks at the events sees everything up to here
        self._tell()
        while self.parked:
            for message in self.inbox.arrivals():
                self._while_parked(message)
            if self.parked and self._session is not None:
                self._is_expired(self._session)
        self._where = None
        self._emit_resumed(since, stop.value if stop is not None else event.kind if event else "", why)
        self._tell()

    def _emit_resumed(self, since: int, at: str, why: str) -> None:
        trace = self._state.trace
        if trace.on:
            self._opening = True
            trace.emit(LoopResumed(since_ns=since, at=at, why=why))
            self._opening = False

    def _while_parked(self, message: ToScheduler) -> None:
        if isinstance(message, DebugReq):
            self.command(message)
        elif isinstance(message, GetInternalStateReq):
            self._to_tokenizer.send(HealthCheckOutput(rid="", forward=False))
            answer = GetInternalStateReqOutput(id=message.id, state=dict(internal_state(self._state)))
            self._to_detokenizer.send(answer)
        elif isinstance(message, TokenizedGenerateReqInput) and message.rid.startswith(HEALTH_CHECK_PREFIX):
            self._to_tokenizer.send(HealthCheckOutput(rid=""))  # it is parked on purpose, not ill
        else:
            self.inbox.keep(message)
            if isinstance(message, ShutdownReq):
                self._let_go("the engine is shutting down")

    def _in_a_hurry(self) -> bool:
        return self._session is not None and self._session.wants_a_stop()

    # ------------------------------------------------------------ coming and going

    def _is_expired(self, session: Session) -> bool:
        """Let go of a debugger that gave no sign of life; says whether it was so."""
        if self._host.clock.now() < session.expires_ns:
            return False
        self._let_go(f"the debugger gave no sign of life for {session.lease_ns / NS_PER_S:g} s")
        log.warning("%s; the scheduler runs on", self._note)
        return True

    def _attach(self, name: str, command: Attach) -> None:
        trace = self._state.trace
        if self._session is not None and self._session.name != name:
            left = (self._session.expires_ns - self._host.clock.now()) / NS_PER_S
            raise Unavailable(
                "another debugger is attached; it must let go first, and counts as gone when it gives no sign of "
                f"life (in {max(left, 0.0):.1f} s if it gives none from now on)"
            )
        if isinstance(trace.sink, NullSink):
            raise BadRequest("events are switched off, and without them there is nothing to step by")
        lease = round(command.lease_s * NS_PER_S)
        if self._session is None:
            self._session = Session(name, lease, 0)
            self._sink = BreakpointSink(trace.sink, self._seen)
            trace.sink = self._sink
        self._session.lease_ns = lease
        self._session.renew(self._host.clock.now())
        self.awake = True
        self._note = ""

    def _let_go(self, note: str) -> None:
        """Forget the debugger and run on."""
        if self._session is None:
            return
        assert self._sink is not None
        self._state.trace.sink = self._sink.inner
        self._session = self._sink = None
        self._note = note
        was_parked, self.parked = self.parked, False
        if not was_parked:  # else the news goes out as soon as it runs on
            self._tell()

    # ------------------------------------------------------------ commands

    def command(self, message: DebugReq) -> None:
        """Do what a debugger asks, and answer."""
        try:
            answer = self._done(message) or DebugReqOutput(id="", status=self.status())
            answer.status = self.status()
        except SgvizError as error:
            answer = DebugReqOutput(
                id="", status=self.status(), error=error.message, error_status=error.status
            )
        answer.id = message.id
        self._to_tokenizer.send(answer)

    def _done(self, message: DebugReq) -> DebugReqOutput | None:
        command, session = message.command, self._session
        if isinstance(command, Attach):
            self._attach(message.session, command)
            return None
        if isinstance(command, Detach) and not message.session:
            self._let_go("the engine let go of its debugger")
            return None
        if session is None or session.name != message.session:
            if isinstance(command, Detach):
                return None
            raise NotFound("this debugger is not attached" + (f": {self._note}" if self._note else ""))
        session.renew(self._host.clock.now())
        return self._doing[type(command)](session, command)

    def status(self) -> DebugStatus:
        session = self._session
        return DebugStatus(
            attached=session is not None,
            parked=self.parked,
            stop_no=self._stop_no,
            where=self._where,
            breakpoints=tuple(point.view() for point in session.breakpoints.values()) if session else (),
            note=self._note,
        )

    def _tell(self) -> None:
        self._to_tokenizer.send(DebugReqOutput(id="", status=self.status()))

    def _resume(self, session: Session, command: Resume) -> None:
        test = self._test(command.until, command.local) if command.until or command.local else None
        session.goal = goal_of(command, self._state.trace.iteration, test)
        self._where = None
        self.parked = False

    def _pause(self, session: Session, command: Pause) -> None:
        if not self.parked:
            session.goal = Goal("stop", self._state.trace.iteration, why="pause")

    def _forget(self, session: Session, command: Forget) -> None:
        session.goal = None

    def _add(self, session: Session, command: AddBreakpoint) -> DebugReqOutput:
        point = session.add(command.text or command.local, self._test(command.text, command.local))
        return DebugReqOutput(id="", status=self.status(), number=point.number)

    def _remove(self, session: Session, command: RemoveBreakpoint) -> None:
        session.remove(command.number)

    def _look(self, session: Session, command: Look) -> DebugReqOutput:
        view: DebugView = self._viewer.view(command.what, command.rid)
        return DebugReqOutput(id="", status=self.status(), view=view)

    def _set_limits(self, session: Session, command: SetLimits) -> None:
        if not self.parked:
            raise BadRequest("limits can be changed at a stop only; pause first")
        self._changes.ask(command)

    def _test(self, text: str, local: str) -> Callable[[Event], object]:
        return compiled(text) if not local else self._host.predicate(local)
