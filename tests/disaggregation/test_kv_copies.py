"""Copies are taken up in the order in which they began, with their times or with what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sgviz.disaggregation.copies import Copies
from sgviz.events.clock import VirtualClock


@dataclass
class HandCopy:
    """A copy that is over when the test says so, or when somebody waits for it."""

    error: Exception | None = None
    ready: bool = False
    calls: list[Callable[[], None]] = field(default_factory=list)

    def done(self) -> bool:
        return self.ready

    def on_done(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def result(self) -> tuple[int, int]:
        self.ready = True
        if self.error is not None:
            raise self.error
        return 3, 4


def test_a_later_one_waits_for_those_before_it() -> None:
    copies: Copies[str] = Copies(VirtualClock(7), lambda: None)
    first, second = HandCopy(), HandCopy(ready=True)
    copies.add("first", first)
    copies.add("nothing", None)
    copies.add("second", second)
    assert list(copies.over()) == [] and list(copies) == ["first", "nothing", "second"]
    first.ready = True
    assert list(copies.over()) == [("first", (3, 4)), ("nothing", (7, 7)), ("second", (3, 4))]
    assert not copies


def test_one_that_fails_says_so_and_holds_up_nobody() -> None:
    copies: Copies[str] = Copies(VirtualClock(7), lambda: None)
    error = OSError("no such page")
    copies.add("bad", HandCopy(error))
    copies.add("good", HandCopy())
    assert list(copies.over(wait=True)) == [("bad", error), ("good", (3, 4))]


def test_the_bell_rings_when_one_is_done() -> None:
    rung: list[str] = []
    copies: Copies[str] = Copies(VirtualClock(7), lambda: rung.append("!"))
    copy = HandCopy()
    copies.add("one", copy)
    copies.add("nothing", None)
    for call in copy.calls:
        call()
    assert rung == ["!"]
