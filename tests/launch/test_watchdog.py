"""The watchdog on its own: what counts as stuck, and what does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sgviz.launch.watchdog import Progress, Watchdog, stacks

TIMEOUT_S = 0.1
LONG_S = 10 * TIMEOUT_S


@dataclass
class Loop:
    """A loop as the watchdog sees it."""

    turn: int = 1
    busy: bool = True
    reports: list[str] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)

    def progress(self) -> Progress:
        return Progress(self.turn, self.busy)

    def stuck(self, why: str) -> None:
        self.reports.append(why)
        self.told.set()


@contextmanager
def watched(loop: Loop) -> Iterator[Watchdog]:
    dog = Watchdog("loop", loop.progress, TIMEOUT_S, loop.stuck)
    try:
        yield dog
    finally:
        dog.stop()


def while_waiting(act: Callable[[], None]) -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        act()
        time.sleep(TIMEOUT_S / 20)


def test_a_busy_loop_that_stays_in_one_turn_is_told_once() -> None:
    loop = Loop(turn=17)
    with watched(loop):
        assert loop.told.wait(60)
        while_waiting(lambda: None)
    assert loop.reports == ["no progress for 0.1 s (watchdog_timeout) in turn 17 of the loop's loop"]


def test_an_idle_loop_may_stay_where_it_is() -> None:
    loop = Loop(busy=False)
    with watched(loop):
        while_waiting(lambda: None)
    assert loop.reports == []


def test_a_busy_loop_that_moves_is_left_alone() -> None:
    loop = Loop()

    def move() -> None:
        loop.turn += 1

    with watched(loop):
        while_waiting(move)
    assert loop.reports == []


def test_while_paused_nothing_counts_and_afterwards_it_does() -> None:
    loop = Loop()
    with watched(loop) as dog:
        dog.pause()
        while_waiting(lambda: None)
        assert loop.reports == []
        dog.resume()
        assert loop.told.wait(60)


def test_a_stopped_one_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with watched(Loop(busy=False)) as dog:
        assert set(threading.enumerate()) > before
    dog.stop()
    assert set(threading.enumerate()) == before


def test_it_may_be_stopped_from_its_own_report() -> None:
    loop = Loop()
    dogs: list[Watchdog] = []

    def stop(why: str) -> None:
        dogs[0].stop()
        loop.stuck(why)

    dogs.append(Watchdog("loop", loop.progress, TIMEOUT_S, stop))
    assert loop.told.wait(60)
    dogs[0].stop()


def test_stacks_name_every_thread_and_where_it_is() -> None:
    go = threading.Event()

    def a_function_to_be_found() -> None:
        go.wait()

    thread = threading.Thread(target=a_function_to_be_found, name="somebody")
    thread.start()
    text = stacks()
    go.set()
    thread.join()
    assert "thread somebody" in text and "a_function_to_be_found" in text and "thread MainThread" in text
