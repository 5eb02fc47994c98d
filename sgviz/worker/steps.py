"""Workers around a worker, put in its place while something is asked of its forwards: a sleep before each, a count.

Mirrors `forward_sleep_time` and the step counter of SGLang's scheduler, which there are conditions inside the loop.
Imports: batch, worker.protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.worker.protocol import Launch, NewWeights, Worker


class AroundWorker:
    """Does what the worker in it does."""

    def __init__(self, worker: Worker) -> None:
        self.info = worker.info
        self._worker = worker

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        return self._worker.launch(batch, delay_sample=delay_sample)

    def forget(self, rows: list[int]) -> None:
        self._worker.forget(rows)

    def load_weights(self, model_path: str) -> NewWeights:
        return self._worker.load_weights(model_path)

    def close(self) -> None:
        self._worker.close()


class SlowWorker(AroundWorker):
    """Sleeps `seconds` before each launch."""

    def __init__(self, worker: Worker, seconds: float) -> None:
        super().__init__(worker)
        self._seconds = seconds

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        time.sleep(self._seconds)
        return super().launch(batch, delay_sample=delay_sample)


class WatchedWorker(AroundWorker):
    """Calls `around(batch, launch)` for each launch, which must call `launch` and return what it gives."""

    def __init__(
        self, worker: Worker, around: Callable[[ScheduleBatch, Callable[[], Launch]], Launch]
    ) -> None:
        super().__init__(worker)
        self._around = around

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        return self._around(batch, lambda: self._worker.launch(batch, delay_sample=delay_sample))
