"""One debugger that is attached: its lease, its breakpoints, and what it waits for. Imports: messages, events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sgviz.errors import NotFound
from sgviz.events import Event
from sgviz.messages.debug import BreakpointView, Resume
from sgviz.scheduler.gate.vocabulary import DECISIONS
from sgviz.scheduler.gate.words import sentence
from sgviz.scheduler.stops import Stop

NS_PER_S = 1_000_000_000
TOLD_AT_A_STOP = 6  # decisions that a named stop repeats
_TOLD = frozenset(
    (*DECISIONS, "admit.repeated", "scan.stopped", "chunk.cut", "batch.planned", "request.aborted")
)


@dataclass(slots=True, eq=False)
class Breakpoint:
    """`test` is None once it raised (`fault` says what); a text never does."""

    number: int
    text: str
    test: Callable[[Event], object] | None
    hits: int = 0
    fault: str = ""

    def matches(self, event: Event) -> bool:
        """Whether to park here: the test holds, or it raised, which switches it off."""
        if self.test is None:
            return False
        try:
            found = bool(self.test(event))
        except Exception as error:
            self.test, self.fault = None, f"it raised {type(error).__name__}: {error}"
            return True
        self.hits += found
        return found

    def why(self) -> str:
        return f"breakpoint {self.number}, {self.text}, is switched off: {self.fault}" if self.fault else (
            f"breakpoint {self.number}: {self.text}"
        )  # fmt: skip

    def view(self) -> BreakpointView:
        return BreakpointView(number=self.number, text=self.text, hits=self.hits, fault=self.fault)


@dataclass(slots=True, eq=False)
class Goal:
    """Where the run is to stop once: `to` as in Resume, or at the first event that `until` matches."""

    to: str
    iteration: int
    until: Breakpoint | None = None
    why: str = "step"

    def reached_at(self, iteration: int) -> bool:
        """Whether a named stop in this iteration is it."""
        return self.to == "stop" or (self.to == "iteration" and iteration > self.iteration)


@dataclass(slots=True, eq=False)
class Session:
    """The debugger `name`. `decided`: the events since the last stop that decided something, newest last."""

    name: str
    lease_ns: int
    expires_ns: int
    goal: Goal | None = None
    breakpoints: dict[int, Breakpoint] = field(default_factory=dict)
    next_number: int = 1
    decided: deque[Event] = field(default_factory=lambda: deque(maxlen=TOLD_AT_A_STOP))

    def renew(self, now: int) -> None:
        self.expires_ns = now + self.lease_ns

    def add(self, text: str, test: Callable[[Event], object]) -> Breakpoint:
        point = Breakpoint(self.next_number, text, test)
        self.breakpoints[point.number] = point
        self.next_number += 1
        return point

    def remove(self, number: int) -> None:
        """Raises NotFound if there is no such breakpoint."""
        if self.breakpoints.pop(number, None) is None:
            there = ", ".join(map(str, self.breakpoints)) or "none"
            raise NotFound(f"there is no breakpoint {number}; there are {there}", param="number")

    def hit(self, event: Event) -> str:
        """Why to park at this event, or an empty string."""
        if event.kind in _TOLD:
            self.decided.append(event)
        whys = [point.why() for point in self.breakpoints.values() if point.matches(event)]
        until = self.goal.until if self.goal is not None else None
        if until is not None and until.matches(event):
            whys.append((until.fault and f"{until.text} {until.fault}") or f"until {until.text}")
        return "; ".join(whys)

    def tell(self, stop: Stop | None, event: Event | None) -> tuple[str, ...]:
        """What was just decided, in words: at an event that alone, at a stop all since the last one."""
        told = [event] if event is not None else list(self.decided)
        self.decided.clear()
        return tuple(sentence(one) for one in told)

    def wants_a_stop(self) -> bool:
        return self.goal is not None and self.goal.to in ("stop", "iteration")


def goal_of(command: Resume, iteration: int, test: Callable[[Event], object] | None) -> Goal | None:
    """What the command waits for besides breakpoints."""
    until = Breakpoint(0, command.until or command.local, test) if test is not None else None
    if until is None and command.to == "breakpoint":
        return None
    return Goal(command.to, iteration, until)
