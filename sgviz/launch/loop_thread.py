"""An asyncio loop in a thread of its own, so that an engine works inside a notebook whose loop is running.

Imports: errors.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sgviz.errors import Unavailable

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that have no loop, or another one. `new_loop` makes its own."""

    def __init__(
        self,
        name: str = "sgviz-main",
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.loop = new_loop()
        self._workers = ThreadPoolExecutor(
            thread_name_prefix=f"{name}-work"
        )  # for what would hold up the loop
        self.loop.set_default_executor(self._workers)
        self._lock = threading.Lock()  # what is submitted comes before the end, or not at all
        self._ending = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self._finish_tasks()
        self.loop.close()

    def _finish_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def is_here(self) -> bool:
        """False in a process that was forked from the loop's own: threads and sockets do not come along."""
        return os.getpid() == self._pid

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop from any thread. Unavailable if the loop has ended, or is not here."""
        if not self.is_here:  # asked before the lock, which another thread may have held when it was copied
            coroutine.close()
            raise Unavailable(
                f"process {os.getpid()} was forked from process {self._pid}, which has the engine: use it there, make "
                "another one here, or talk to its server (engine.serve) from here"
            )
        with self._lock:
            if not self._ending:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise Unavailable("the engine is closed")

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine in the loop and wait for it; an interrupt of the waiting thread cancels it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call from inside the engine's own event loop would never return")
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs and end the thread; nothing to do in a forked process."""
        if not self.is_here:
            return
        with self._lock:
            first, self._ending = not self._ending, True
        if first:
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
