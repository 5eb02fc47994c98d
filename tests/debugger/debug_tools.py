"""A small engine with a mock device, load for it that makes every kind of event, and looks at what it recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from sgviz.engine import Engine
from sgviz.events import Event
from sgviz.scheduler.policy import LongestPrefixMatch

GREEDY = {"temperature": 0}  # with ignore_eos the adder would reserve whole outputs and never retract
TIGHT = {
    "device": "mock",
    "max_total_tokens": 256,
    "chunked_prefill_size": 16,
    "schedule_conservativeness": 0.05,
    "shutdown_grace": 5.0,
}  # fmt: skip


class Moody(LongestPrefixMatch):
    """Longest prefix match that raises while it is told to."""

    moody = False

    def order(self, waiting, view):  # type: ignore[no-untyped-def]
        if self.moody:
            raise ValueError("moody")
        return super().order(waiting, view)


def prompt(number: int) -> list[int]:
    """Shared heads of two lengths, own tails; numbers near each other have little in common."""
    head = [5 + number % 3] * (8 + 12 * (number % 2))
    return head + [20 + (number * 7 + i) % 50 for i in range(8 + 9 * (number % 4))]


class Load:
    """Requests of one engine in threads of their own."""

    def __init__(self, engine: Engine, count: int = 12, tokens: int = 50, name: str = "r") -> None:
        self.rids = [f"{name}{i}" for i in range(count)]
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self._engine, self._tokens = engine, tokens
        self._threads = [threading.Thread(target=self._one, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _one(self, number: int) -> None:
        rid = self.rids[number]
        params = {**GREEDY, "max_new_tokens": self._tokens + number}
        out = self._engine.generate(input_ids=prompt(number), sampling_params=params, rid=rid)
        self.outputs[rid] = out["output_ids"]
        self.reasons[rid] = out["meta_info"]["finish_reason"]["type"]

    @property
    def done(self) -> bool:
        return len(self.outputs) == len(self.rids)

    def join(self, timeout: float = 30.0) -> dict[str, list[int]]:
        for thread in self._threads:
            thread.join(timeout)
        assert not any(thread.is_alive() for thread in self._threads), "requests hang"
        return self.outputs


def of_scheduler(engine: Engine, after: int = 0) -> list[Event]:
    """The recorded events of the scheduler with a larger number, in order."""
    events = [event for event in engine.pipeline.ring.snapshot() if event.component == "scheduler"]
    return sorted((event for event in events if event.seq > after), key=lambda event: event.seq)


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def kinds(events: Sequence[Event]) -> list[str]:
    return [event.kind for event in events]
