"""A stream whose work runs late: when somebody waits for it, or by chance when somebody asks whether it is done."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class LateFuture(Future[Any]):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def done(self) -> bool:
        self._stream.by_chance()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self._stream.run_to(self)
        return super().result(timeout)

    @property
    def is_over(self) -> bool:
        return super().done()


class LateStream:
    """In order, in the thread of whoever asks; the seed says when."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: deque[tuple[Callable[[], Any], LateFuture]] = deque()
        self._runs = False

    def submit(self, call: Callable[[], Any]) -> LateFuture:
        future = LateFuture(self)
        self._waiting.append((call, future))
        return future

    def by_chance(self) -> None:
        if not self._runs and self._rng.random() < 0.4:
            self.step(self._rng.randrange(1, 3))

    def step(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            call, future = self._waiting.popleft()
            self._runs = True  # nothing of it may begin the next
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            finally:
                self._runs = False

    def run_to(self, future: LateFuture) -> None:
        while not future.is_over:
            self.step(1)

    def close(self) -> None:
        self.step(len(self._waiting))
