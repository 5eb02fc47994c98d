"""OtherClockWorker: a worker whose times are put on another host's clock, as all times of its scheduler are.

SGLang compares no clocks of several nodes. Imports: batch, worker protocol (no torch here).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.worker.protocol import BatchResult, DeviceTimes, Launch, Worker

STAMPS = tuple(field.name for field in fields(DeviceTimes))


class OtherClockWorker:
    """Satisfies `worker.protocol.Worker`; all but the times of results is the worker's own.

    Its KV does not travel: the two sides of a prefill/decode pair are not spread over nodes.
    """

    def __init__(self, worker: Worker, shift_ns: int) -> None:
        self._worker, self._shift_ns = worker, shift_ns
        self.info = worker.info
        self.forget, self.load_weights, self.close = worker.forget, worker.load_weights, worker.close

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        return _Launch(self._worker.launch(batch, delay_sample=delay_sample), self._shift_ns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class _Launch:
    """Satisfies `worker.protocol.Launch`."""

    def __init__(self, launch: Launch, shift_ns: int) -> None:
        self._launch, self._shift_ns = launch, shift_ns
        self.bid, self.forward_pass_id = launch.bid, launch.forward_pass_id
        self.done, self.sample = launch.done, launch.sample
        self._shifted = False

    def result(self) -> BatchResult:
        result = self._launch.result()
        if not self._shifted:  # it may be asked for twice, and gives the same object
            self._shifted = True
            for name in STAMPS:
                if stamp := getattr(result, name):  # 0: the worker does not tell
                    setattr(result, name, stamp + self._shift_ns)
        return result
