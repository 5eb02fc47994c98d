"""What splitting a run by ranks keeps of a request and of an event. Imports: events."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.events.schema import (
    Event,
    RequestConverted,
    RequestFinished,
    RequestReceived,
    RequestRefused,
    RequestTokenized,
    ResponseFinished,
)

BEGINS = (RequestReceived, RequestConverted, RequestTokenized, RequestRefused)
ENDS = (RequestFinished, RequestRefused, ResponseFinished)


@dataclass(slots=True, eq=False)
class Life:
    """One request under one rid: where it went. `told`: its first events are out. `over`: another may follow.

    Of `LiveSplit`: `held` waits for its rank; `frame` are its first and last events, once they are out; `sent`: it
    went to the controller, so its rank will be told.
    """

    ranks: list[int] = field(default_factory=list)
    decided: bool = False
    told: bool = False
    over: bool = False
    sent: bool = False
    held: list[Waiting] = field(default_factory=list)
    frame: list[Waiting] = field(default_factory=list)


@dataclass(slots=True)
class Waiting:
    """An event that is not out yet, and whose it is."""

    event: Event
    gaps: int  # events of its component that were lost up to it
    lives: tuple[Life, ...]
