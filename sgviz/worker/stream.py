"""Streams: CpuStream is a thread that does for the CPU what a CUDA stream does for a GPU.

Closures run one after another in the order they were launched, while the launching thread goes on;
`WorkerLaunch` is the handle of one of them. InlineStream runs them at once in the launching thread,
ManualStream when somebody steps it: for tests and single-threaded drivers. Mirrors the forward stream of
SGLang's overlap scheduler (v0.4.9: the TpModelWorkerClient's forward thread). Simplified: no priorities.
The idle thread waits on a lock, it never polls. Imports: errors, worker.protocol (no torch).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from sgviz.errors import SgvizError, Unavailable
from sgviz.worker.protocol import BatchResult, Launch

T = TypeVar("T")
R = TypeVar("R", bound=BatchResult)
EXIT_GRACE = 5.0  # seconds a stream nobody closed gets to finish when it is collected or Python ends


class _Task(Generic[T]):
    """A closure and the future its outcome goes to."""

    __slots__ = ("_call", "future")

    def __init__(self, call: Callable[[], T], future: Future[T]) -> None:
        self._call = call
        self.future = future

    def run(self) -> None:
        try:
            outcome = self._call()
        except BaseException as error:  # a SystemExit belongs to the waiter too, not to this thread
            self.future.set_exception(error)
            del self.future  # else error -> traceback -> this frame -> future -> error never dies
        else:
            self.future.set_result(outcome)


Tasks = SimpleQueue[_Task[object] | None]


class Stream(Protocol):
    """Executes closures in launch order."""

    def submit(self, call: Callable[[], T]) -> Future[T]: ...

    def close(self) -> None: ...


class CpuStream:
    """Runs closures in launch order on one thread of its own.

    An exception ends only its own closure: it is raised by that closure's future, the next one runs.
    A stream that is dropped without `close` ends its thread by itself.
    """

    def __init__(self, name: str = "sgviz-stream") -> None:
        self._tasks: Tasks = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        # The thread knows the queue only, so it does not keep the stream (and the model behind it) alive.
        self._thread = threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._tasks, self._thread, EXIT_GRACE)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call` behind those already launched. Raises Unavailable after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise Unavailable(f"stream {self._thread.name!r} is closed: nothing can be launched any more")
            self._tasks.put(_Task(call, future))  # type: ignore[arg-type]
        return future

    def close(self) -> None:
        """Finish what was launched, then end the thread. May be called again; not from the stream itself."""
        with self._lock:
            self._closed = True
        self._finalizer.detach()
        _stop(self._tasks, self._thread, None)


def _run(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # while idle, nothing of the last closure is held


def _stop(tasks: Tasks, thread: threading.Thread, timeout: float | None) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout)


class InlineStream:
    """Runs each closure inside `submit`: the device that takes no time."""

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _Task(call, future).run()
        return future

    def close(self) -> None:
        """Nothing is ever under way."""


class ManualStream:
    """Runs closures when `step` is called, in the stepping thread; between steps they are under way."""

    def __init__(self) -> None:
        self._waiting: deque[_Task[object]] = deque()

    @property
    def pending(self) -> int:
        """Launches under way."""
        return len(self._waiting)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.append(_Task(call, future))  # type: ignore[arg-type]
        return future

    def step(self, count: int = 1) -> int:
        """Complete the `count` oldest launches (fewer if fewer are under way); returns how many."""
        steps = min(count, len(self._waiting))
        for _ in range(steps):
            self._waiting.popleft().run()
        return steps

    def close(self) -> None:
        self.step(len(self._waiting))


class WorkerLaunch(Generic[R]):
    """A forward under way on a stream; satisfies `worker.protocol.Launch`."""

    __slots__ = ("_future", "bid", "forward_pass_id")

    def __init__(self, bid: int, forward_pass_id: int, future: Future[R]) -> None:
        self.bid = bid
        self.forward_pass_id = forward_pass_id
        self._future = future

    def sample(self) -> None:
        """It samples by itself."""

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> R:
        """Wait for the forward. Raises what it raised, however often it is asked."""
        return self._future.result()


class DelayedLaunch:
    """A forward whose sampling waits for `sample()`; satisfies `worker.protocol.Launch`.

    Args:
        begin: puts the sampling on the stream behind the forward; called once.
    """

    __slots__ = ("_begin", "_launch", "bid", "forward_pass_id")

    def __init__(self, bid: int, forward_pass_id: int, begin: Callable[[], Launch]) -> None:
        self.bid = bid
        self.forward_pass_id = forward_pass_id
        self._begin = begin
        self._launch: Launch | None = None

    def sample(self) -> None:
        if self._launch is None:
            self._launch = self._begin()

    def done(self) -> bool:
        return self._launch is not None and self._launch.done()

    def result(self) -> BatchResult:
        """Wait for the sampling. Raises SgvizError if it was never begun: that wait would not end."""
        if self._launch is None:
            raise SgvizError(f"batch {self.bid} waits for its sampling: call sample() before result()")
        return self._launch.result()
