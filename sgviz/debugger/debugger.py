"""Debugger: step through a running scheduler, look at it, change its limits, and let it go again.

SGLang has no counterpart. Imports: debugger.link, messages, recording.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import msgspec

from sgviz.debugger.bridge import LONGEST_WAIT_S, Asked, DebugReply, StepTo, Wait
from sgviz.debugger.link import Heartbeat, Link
from sgviz.debugger.past import Past
from sgviz.debugger.routes import command_of
from sgviz.errors import BadRequest, SgvizError, Unavailable, suggest
from sgviz.events import Event
from sgviz.messages.debug import (
    LEASE_S,
    AddBreakpoint,
    AdderView,
    Attach,
    BatchView,
    BreakpointView,
    DebugStatus,
    DebugView,
    Detach,
    Forget,
    LimitsView,
    Look,
    Pause,
    PoolsView,
    RemoveBreakpoint,
    ReqView,
    Resume,
    Section,
    SetLimits,
    TreeNodeView,
    TypeView,
    Where,
)
from sgviz.recording import Moment

Test = str | Callable[[Event], object]
TIMEOUT_S = 60.0
STEPS = ("stop", "decision", "iteration")
GOALS = ("prefill", "first token", "finish")
NEVER = 1 << 62


class Debugger:
    """Holds the scheduler of one engine; use it as a context manager, which always lets it run on.

    Nothing is parked by attaching. `step`, `run` and `pause` return where it is parked then; `continue_` returns at
    once, and `wait` waits for the next breakpoint. Looking works at any time: of a running scheduler at its next turn.

    Args:
        lease_s: if this program gives no sign of life for so long, the scheduler runs on by itself.
        timeout_s: how long `step`, `run` and `pause` wait unless they are told otherwise.

    Raises:
        Unavailable: another debugger is attached, or the engine is gone.
    """

    def __init__(self, link: Link, *, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._session = uuid.uuid4().hex
        self._timeout_s = timeout_s
        self._seen: tuple[int, dict[str, object]] = (-1, {})
        self._closed = False
        self._ask(Attach(lease_s=lease_s))
        self._heartbeat = Heartbeat(link, self._session, lease_s)
        self._forgotten = weakref.finalize(self, self._heartbeat.stop)
        self.breakpoints = Breakpoints(self._ask, link.local)
        self._past = Past(link.recording, lambda: self.where)

    # ------------------------------------------------------------ going on

    def step(
        self,
        what: Literal["stop", "decision", "iteration"] = "stop",
        *,
        rid: str | None = None,
        to: Literal["prefill", "first token", "finish"] | None = None,
        timeout: float | None = None,
    ) -> Where:
        """Run to the next stop of the loop, the next decision or the next iteration, or until `rid` is at `to`.

        A decision is an admission verdict, an eviction or a retraction. A refusal that only repeats itself is told
        once, so it counts once. `to`: the batch with the prompt's last or only piece so far is planned; the first
        token is there; the request ends. A breakpoint may stop it earlier.

        Raises:
            BadRequest: no such step, or `rid` is past it. Unavailable: nothing stopped it in time; it runs on.
        """
        if rid is not None or to is not None:
            if rid is None or to is None or to not in GOALS:
                raise BadRequest(
                    f"give both rid and to (one of {', '.join(GOALS)}), not rid={rid!r}, to={to!r}"
                )
            return self._run(StepTo(rid=rid, to=to), timeout)
        if what not in STEPS:
            raise BadRequest(f"step {what!r} is not one of {', '.join(STEPS)}{suggest(what, STEPS)}")
        return self._run(Resume(until="decision") if what == "decision" else Resume(to=what), timeout)

    def run(self, until: Test | None = None, *, timeout: float | None = None) -> Where:
        """Run until an event for which `until` holds (a text, or a function where threads are), or a breakpoint.

        Raises:
            BadRequest: the text is wrong (with the column), or a function cannot reach the scheduler.
            Unavailable: nothing stopped it in time; it runs on.
        """
        if until is None or isinstance(until, str):
            return self._run(Resume(until=until or ""), timeout)
        return self._run(Resume(local=self._link.local(until)), timeout)

    def continue_(self) -> None:
        """Run on to the next breakpoint, if one comes; returns at once."""
        self._ask(Resume())

    def pause(self, *, timeout: float | None = None) -> Where:
        """Park at the next stop of the loop; where it is parked already, stay."""
        status = self._ask(Pause()).status
        return self._stopped(status.stop_no - status.parked, timeout)

    def wait(self, *, timeout: float | None = None) -> Where:
        """Wait until it is parked; returns at once if it is."""
        status = self.status
        return self._stopped(status.stop_no - status.parked, timeout, keep=True)

    def close(self) -> None:
        """Let go: breakpoints vanish, the scheduler runs on. Harmless when done before or when the engine is gone."""
        if self._closed:
            return
        self._closed = True
        self._forgotten()
        with contextlib.suppress(SgvizError, RuntimeError):
            self._link.ask(self._session, Detach())
        self._heartbeat.join()
        self._link.close()

    def __enter__(self) -> Debugger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ looking

    @property
    def status(self) -> DebugStatus:
        """Attached or not, parked or not, and where."""
        return self._link.ask(self._session, Wait(after=NEVER)).status

    @property
    def parked(self) -> bool:
        return self.status.parked

    @property
    def where(self) -> Where | None:
        """Where it is parked, what was just decided and why; None while it runs."""
        return self.status.where

    @property
    def waiting(self) -> Sequence[ReqView]:
        """The queue in its order."""
        return Rows(self._look("waiting").waiting or ())

    @property
    def running(self) -> Sequence[ReqView]:
        """The requests past the queue whose prompt is not being cut."""
        return Rows(self._look("running").running or ())

    @property
    def chunked(self) -> ReqView | None:
        """The request whose prompt is being cut, if one is."""
        return next(iter(self._look("chunked").chunked or ()), None)

    @property
    def adder(self) -> AdderView | None:
        """The budgets of the PrefillAdder, as they stand or as the last plan left them; None before the first."""
        return self._look("adder").adder

    @property
    def pools(self) -> PoolsView:
        """KV tokens by state, rows, and who holds what."""
        pools = self._look("pools").pools
        assert pools is not None
        return pools

    @property
    def limits(self) -> LimitsView:
        """The limits in force, and those that will be."""
        limits = self._look("limits").limits
        assert limits is not None
        return limits

    @property
    def tree(self) -> Sequence[TreeNodeView]:
        """The radix tree, parents before children."""
        return Rows(self._look("tree").tree or ())

    @property
    def batches(self) -> Sequence[BatchView]:
        """The batch planned last and the running one."""
        return Rows(self._look("batches").batches or ())

    def types(self, rid: str) -> Sequence[TypeView]:
        """One request as the types that hold it now, outside in. Raises NotFound if it is nowhere."""
        return Rows(self._look("types", rid).types or ())

    def set_limits(
        self,
        *,
        max_running_requests: int | None = None,
        chunked_prefill_size: int | None = None,
        schedule_policy: str | None = None,
        max_total_tokens: int | None = None,
    ) -> LimitsView:
        """Change limits of the parked scheduler; they hold from the next stop of the loop on.

        Args:
            chunked_prefill_size: -1: never cut. schedule_policy: a built-in one.
            max_total_tokens: KV tokens of the pool, downwards. Pages in use leave it when they come free.

        Raises:
            BadRequest: it is not parked, or a value is not allowed (nothing is changed then).
        """
        self._ask(
            SetLimits(
                max_running_requests=max_running_requests,
                chunked_prefill_size=chunked_prefill_size,
                schedule_policy=schedule_policy,
                max_total_tokens=max_total_tokens,
            )
        )
        self._seen = (-1, {})
        return self.limits

    # ------------------------------------------------------------ the past

    def back(self, what: Literal["event", "decision", "iteration"] = "event", count: int = 1) -> Moment:
        """The state that many events, decisions or iterations earlier, from the recording; again goes further back.

        The engine does not move. The next stop brings the view back to the present.
        """
        return self._past.move(what, -count)

    def forward(self, what: Literal["event", "decision", "iteration"] = "event", count: int = 1) -> Moment:
        """The opposite of `back`, at most to the present."""
        return self._past.move(what, count)

    def relay(self, body: dict[str, Any]) -> dict[str, Any]:
        """A command as POST /sgviz/debug takes it, without a session, and its answer; raises what that answers with."""
        self._seen = (-1, {})
        answer: dict[str, Any] = msgspec.to_builtins(self._ask(command_of(body)))
        return answer

    def __repr__(self) -> str:
        if self._closed:
            return "<sgviz debugger, closed>"
        status = self.status
        if status.where is not None:
            return f"<sgviz debugger, parked>\n{status.where!r}"
        return f"<sgviz debugger, {'running' if status.attached else f'let go: {status.note}'}>"

    # ------------------------------------------------------------ inside

    def _ask(self, command: Asked) -> DebugReply:
        if self._closed:
            raise Unavailable("this debugger was closed")
        return self._link.ask(self._session, command)

    def _run(self, resume: Resume | StepTo, timeout: float | None) -> Where:
        return self._stopped(self._ask(resume).status.stop_no, timeout)

    def _stopped(self, after: int, timeout: float | None, *, keep: bool = False) -> Where:
        """Where it is parked after stop `after`. However the wait ends without one, no step is left under way."""
        left = self._timeout_s if timeout is None else timeout
        try:
            while True:
                status = self._ask(Wait(after=after, timeout_s=min(max(left, 0.0), LONGEST_WAIT_S))).status
                if status.parked and status.where is not None and status.stop_no > after:
                    return status.where
                if not status.attached:
                    raise Unavailable(f"the scheduler was let go: {status.note}")
                left -= LONGEST_WAIT_S
                if left <= 0:
                    raise Unavailable(
                        "nothing stopped the run in time; the scheduler runs on (`pause` stops it)"
                    )
        except BaseException:
            if not keep:
                with contextlib.suppress(SgvizError, RuntimeError):
                    self._ask(Forget())
            raise

    def _look(self, section: Section, rid: str = "") -> DebugView:
        """A section; at a stop each is asked for once."""
        stop_no, known = self._seen
        key = f"{section} {rid}"
        status = self.status
        if not status.parked or status.stop_no != stop_no:
            self._seen = (status.stop_no if status.parked else -1, known := {})
        if key not in known:
            known[key] = self._ask(Look(what=(section,), rid=rid)).view or DebugView()
        view = known[key]
        assert isinstance(view, DebugView)
        return view


class Breakpoints(Sequence[BreakpointView]):
    """The breakpoints of a debugger, as the scheduler has them; they survive `continue_`."""

    def __init__(
        self, ask: Callable[[Asked], DebugReply], local: Callable[[Callable[[Event], object]], str]
    ) -> None:
        self._ask = ask
        self._local = local

    def add(self, test: Test) -> int:
        """Park at every event for which `test` holds, right where it is emitted; the number to remove it by.

        Args:
            test: a text such as `refused and reason == "kv"`, or a function of the event (threads only).
        """
        command = (
            AddBreakpoint(text=test) if isinstance(test, str) else AddBreakpoint(local=self._local(test))
        )
        return self._ask(command).number

    def remove(self, number: int) -> None:
        """Raises NotFound if there is no such breakpoint."""
        self._ask(RemoveBreakpoint(number=number))

    def clear(self) -> None:
        for point in self.list():
            self.remove(point.number)

    def list(self) -> tuple[BreakpointView, ...]:
        return self._ask(Wait(after=NEVER)).status.breakpoints

    @overload
    def __getitem__(self, index: int) -> BreakpointView: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[BreakpointView]: ...

    def __getitem__(self, index: int | slice) -> BreakpointView | Sequence[BreakpointView]:
        return self.list()[index]

    def __iter__(self) -> Iterator[BreakpointView]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.list())) or "<no breakpoints>"


class Rows(tuple):  # type: ignore[type-arg]
    """Views one below the other."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "<none>"
