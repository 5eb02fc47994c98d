"""The scheduler's rig with a device on the same virtual clock: batches take time, and so does the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rig import Rig

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.events import Event, VirtualClock
from sgviz.recording import Header, Recording
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.protocol import GenerationBatchResult, WorkerInfo

BASE_NS = 500_000
TOKEN_NS = 40_000


class TimedLaunch:
    """A launch whose result comes when the virtual device is done; waiting for it moves the clock."""

    def __init__(self, inner: Any, clock: VirtualClock, start: int, end: int) -> None:
        self._inner, self._clock, self._span = inner, clock, (start, end)
        self.bid, self.forward_pass_id = inner.bid, inner.forward_pass_id

    def done(self) -> bool:
        return self._clock.now() >= self._span[1]

    def sample(self) -> None:
        self._inner.sample()

    def result(self) -> GenerationBatchResult:
        result: GenerationBatchResult = self._inner.result()
        self._clock.advance(max(0, self._span[1] - self._clock.now()))
        result.start_ns, result.end_ns = self._span
        return result


@dataclass
class TimedWorker:
    """MockWorker on a virtual device: a batch takes a base and so much a token, one batch after the other."""

    inner: MockWorker
    clock: VirtualClock = field(default_factory=VirtualClock)
    busy_until: int = 0

    @property
    def info(self) -> WorkerInfo:
        return self.inner.info

    def launch(self, batch: ScheduleBatch, **options: Any) -> TimedLaunch:
        start = max(self.clock.now() + 2_000, self.busy_until)
        self.busy_until = start + BASE_NS + TOKEN_NS * sum(batch.extend_lens)
        return TimedLaunch(self.inner.launch(batch, **options), self.clock, start, self.busy_until)

    def forget(self, rows: list[int]) -> None:
        self.inner.forget(rows)

    def close(self) -> None:
        self.inner.close()


class TimedRig(Rig):
    """`recording()` gives what a reader would have of the run; the sizes stand in the header."""

    def __init__(
        self,
        *,
        tokens: int = 512,
        context_len: int = 256,
        vocab_size: int = 97,
        eos_every: int = 0,
        **settings: Any,
    ) -> None:
        info = mock_info(vocab_size=vocab_size, context_len=context_len, max_total_num_tokens=tokens)
        page = int(settings.get("page_size", 1))
        inner = MockWorker(info, eos_every=eos_every, threaded=False, check=True, page_size=page)
        worker = TimedWorker(inner)
        super().__init__(
            tokens=tokens, context_len=context_len, vocab_size=vocab_size, worker=worker, **settings
        )
        worker.clock = self.clock

    def events(self) -> list[Event]:
        return self.ring.snapshot()

    def recording(self) -> Recording:
        return Recording(self.events(), Header(configured=self.configured(), clock="virtual"))
