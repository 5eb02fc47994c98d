"""What the host's work costs in virtual time: measured while it really happens, or constants.

Each component has a clock of its own on one common axis, as each has a core of its own in `mode="processes"`.
A measured clock moves with the CPU time of the thread while its component works; a modelled one stands still and
is moved by what the stages are said to cost. Imports: errors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from sgviz.errors import ConfigError

US = 1000  # nanoseconds


class ActorClock(Protocol):
    """The time of one component. It is resumed while the component works, and paused otherwise."""

    def now(self) -> int: ...

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def advance_to(self, ns: int) -> None:
        """Wait: move to `ns` if that is later."""
        ...

    def charge(self, ns: int) -> None:
        """Modelled work takes `ns`; a measured clock has counted it already."""
        ...

    def spend(self, ns: int) -> None:
        """Work that does not happen here takes `ns` on any clock."""
        ...

    def charge_after_next_stamp(self, ns: int) -> None:
        """The same, behind the next reading: work that begins with stamping an event."""
        ...


class MeasuredClock:
    """Moves with the CPU time of this thread, times `scale`, while resumed."""

    __slots__ = ("_base", "_mark", "_running", "_scale")

    def __init__(self, start: int, scale: float) -> None:
        self._base = start
        self._scale = scale
        self._mark = 0
        self._running = False

    def now(self) -> int:
        if not self._running:
            return self._base
        return self._base + int((time.thread_time_ns() - self._mark) * self._scale)

    def resume(self) -> None:
        self._mark = time.thread_time_ns()
        self._running = True

    def pause(self) -> None:
        self._base = self.now()
        self._running = False

    def advance_to(self, ns: int) -> None:
        self._base = max(self.now(), ns)
        self._mark = time.thread_time_ns()

    def charge(self, ns: int) -> None:
        """The work itself has moved the clock."""

    def spend(self, ns: int) -> None:
        self._base += ns

    def charge_after_next_stamp(self, ns: int) -> None:
        """The work itself moves the clock."""


class ModelledClock:
    """Moves when told to, and never by itself."""

    __slots__ = ("_due", "_now")

    def __init__(self, start: int) -> None:
        self._now = start
        self._due = 0

    def now(self) -> int:
        now, self._now, self._due = self._now, self._now + self._due, 0
        return now

    def resume(self) -> None:
        """Work costs what is charged."""

    def pause(self) -> None:
        self.now()  # what is due is done by now

    def advance_to(self, ns: int) -> None:
        self._now = max(self._now + self._due, ns)
        self._due = 0

    def charge(self, ns: int) -> None:
        self._now += ns

    def spend(self, ns: int) -> None:
        self._now += ns

    def charge_after_next_stamp(self, ns: int) -> None:
        self._due += ns


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHost:
    """Host work takes the CPU time it takes here, times `scale` (0.5: a core twice as fast).

    Attributes:
        send_us: what a socket costs the sender, since here there is none (30: measured with ZMQ over ipc).
        hop_us: a message's way between two processes, which is nobody's work.
    """

    scale: float = 1.0
    send_us: float = 30.0
    hop_us: float = 60.0

    def __post_init__(self) -> None:
        if not self.scale > 0 or self.hop_us < 0 or self.send_us < 0:
            raise ConfigError(f"MeasuredHost takes a scale above 0 and times of 0 or more, got {self}")

    @property
    def label(self) -> str:
        return f"measured CPU time x {self.scale:g}"

    @property
    def hop_ns(self) -> int:
        return int(self.hop_us * US)

    @property
    def send_ns(self) -> int:
        return int(self.send_us * US)

    def clock(self, start: int) -> ActorClock:
        return MeasuredClock(start, self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """Host work takes these microseconds: a constant a stage and a slope a request (or token).

    Two runs with the same arrivals are equal to the nanosecond. The defaults are set by hand, near what this
    project's own code takes for a decode step with events on; `benchmarks/overlap.py` shows how near.

    Attributes:
        turn_us, turn_per_request_us: taking in messages and planning, by running request.
        launch_us, launch_per_request_us: handing the batch to the device.
        process_us, process_per_request_us: putting the result into the requests.
        tokenize_us, tokenize_per_token_us: TokenizerManager, by request and prompt token.
        detokenize_us, detokenize_per_request_us: detokenizer, by message and request in it.
        answer_us, answer_per_request_us: TokenizerManager taking in a message of the detokenizer.
        hop_us: a message's way through a socket.
    """

    turn_us: float = 60.0
    turn_per_request_us: float = 3.2
    launch_us: float = 35.0
    launch_per_request_us: float = 0.8
    process_us: float = 45.0
    process_per_request_us: float = 2.6
    tokenize_us: float = 300.0
    tokenize_per_token_us: float = 3.0
    detokenize_us: float = 40.0
    detokenize_per_request_us: float = 20.0
    answer_us: float = 60.0
    answer_per_request_us: float = 60.0
    hop_us: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise ConfigError(f"HostModel.{name} is {getattr(self, name)}; a cost is 0 or more")

    @property
    def label(self) -> str:
        return "modelled constants"

    @property
    def send_ns(self) -> int:
        """Sending is a part of the constants."""
        return 0

    @property
    def hop_ns(self) -> int:
        return int(self.hop_us * US)

    def clock(self, start: int) -> ActorClock:
        return ModelledClock(start)

    def turn_ns(self, running: int) -> int:
        return int((self.turn_us + self.turn_per_request_us * running) * US)

    def launch_ns(self, rows: int) -> int:
        return int((self.launch_us + self.launch_per_request_us * rows) * US)

    def process_ns(self, rows: int) -> int:
        return int((self.process_us + self.process_per_request_us * rows) * US)

    def tokenize_ns(self, tokens: int) -> int:
        return int((self.tokenize_us + self.tokenize_per_token_us * tokens) * US)

    def detokenize_ns(self, rows: int) -> int:
        return int((self.detokenize_us + self.detokenize_per_request_us * rows) * US)

    def answer_ns(self, rows: int) -> int:
        return int((self.answer_us + self.answer_per_request_us * rows) * US)


Host = MeasuredHost | HostModel
