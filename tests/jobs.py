"""Calls that run beside the test, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0


class Job(Generic[T]):
    """`call(*arguments)`, under way from now on."""

    def __init__(self, call: Callable[..., T], *arguments: object) -> None:
        self._future: Future[T] = Future()
        Thread(target=self._run, args=(call, arguments), daemon=True).start()

    def _run(self, call: Callable[..., T], arguments: tuple[object, ...]) -> None:
        try:
            self._future.set_result(call(*arguments))
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        """Wait for it. Raises what it raised."""
        return self._future.result(PATIENCE_S)
