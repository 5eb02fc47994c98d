"""CudaStreams: forwards on one CUDA stream, results to the host on another.

The host thread only enqueues: it goes on to the next launch while this one computes, and who wants the result
waits for the event behind its copy. Mirrors SGLang's forward_stream and copy_stream. Needs a GPU: on a CPU
machine nothing of it runs. Imports: worker, torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sgviz.worker.host_result import Pass, to_result
from sgviz.worker.protocol import GenerationBatchResult
from sgviz.worker.sampler import Sampled
from sgviz.worker.sampling_batch import SamplingBatch

ANCHOR_EVERY_NS = 10 * 10**9  # single precision has a microsecond left after so long


class TimedEvent(Protocol):
    """A point of the device's time; `torch.cuda.Event(enable_timing=True)` is one."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from here to `end_event`, in single precision."""
        ...


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event of which the host's time is known too."""

    event: TimedEvent
    ns: int

    def at(self, event: TimedEvent) -> int:
        """The event's time on the host's monotonic clock."""
        return self.ns + round(self.event.elapsed_time(event) * 1e6)


class Anchors:
    """The newest anchor, renewed before times counted from it lose their microseconds.

    Args:
        take: makes one now. now: the host's monotonic clock, in nanoseconds.
    """

    def __init__(self, take: Callable[[], Anchor], now: Callable[[], int]) -> None:
        self._take = take
        self._now = now
        self.newest = take()

    def current(self) -> Anchor:
        """An anchor for events to be recorded now."""
        if self._now() - self.newest.ns >= ANCHOR_EVERY_NS:
            self.newest = self._take()
        return self.newest


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A forward that was enqueued: `host` holds the results once `copied` has passed."""

    host: Sampled
    sampling: SamplingBatch
    of: Pass
    anchor: Anchor
    started: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event

    def wait(self) -> GenerationBatchResult:
        self.copied.synchronize()
        return to_result(
            self.host,
            self.sampling,
            self.of,
            self.anchor.at(self.started),
            self.anchor.at(self.ended),
        )


class CudaStreams:
    """The streams of one worker."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # weights and pools were written on the default stream
        self._forward = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._quiet = torch.cuda.Stream(device)  # nothing runs on it, so an event on it passes at once
        self._anchors = Anchors(self._take_anchor, time.monotonic_ns)

    def enqueue(self, work: Callable[[], None]) -> None:
        """Put `work` between the forwards, without a result."""
        with torch.cuda.stream(self._forward):
            work()

    def begin(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.Event, Tensor]:
        """Enqueue the first half of a forward whose sampling waits; what it gave, and the event of its start."""
        self._anchors.current()
        started = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._forward):
            started.record(self._forward)
            return started, work()

    def run(
        self,
        work: Callable[[], Sampled],
        sampling: SamplingBatch,
        of: Pass,
        started: torch.cuda.Event | None = None,
    ) -> InFlight:
        """Enqueue `work` and the copy of what it sampled; `started`: of the half that `begin` enqueued."""
        anchor = self._anchors.newest if started else self._anchors.current()
        first = started or torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._forward):
            if started is None:
                first.record(self._forward)
            sampled = work()
            ended.record(self._forward)
        self._copy.wait_event(ended)
        with torch.cuda.stream(self._copy):
            host = Sampled(
                tokens=self._to_host(sampled.tokens),
                logprobs=self._to_host_if(sampled.logprobs),
                top_logprobs=self._to_host_if(sampled.top_logprobs),
                top_ids=self._to_host_if(sampled.top_ids),
            )
            copied.record(self._copy)
        return InFlight(
            host=host,
            sampling=sampling,
            of=of,
            anchor=anchor,
            started=first,
            ended=ended,
            copied=copied,
        )

    def _take_anchor(self) -> Anchor:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._quiet)
        event.synchronize()
        return Anchor(event, time.monotonic_ns())

    def _to_host(self, tensor: Tensor) -> Tensor:
        tensor.record_stream(self._copy)  # its memory is not reused before the copy is done
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _to_host_if(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._to_host(tensor)


class CudaLaunch:
    """A forward under way on a GPU; satisfies `worker.protocol.Launch`."""

    __slots__ = ("_future", "bid", "forward_pass_id")

    def __init__(self, bid: int, forward_pass_id: int, future: Future[InFlight]) -> None:
        self.bid = bid
        self.forward_pass_id = forward_pass_id
        self._future = future

    def sample(self) -> None:
        """It samples by itself."""

    def done(self) -> bool:
        if not self._future.done():
            return False
        if self._future.exception() is not None:
            return True
        passed: bool = self._future.result().copied.query()
        return passed

    def result(self) -> GenerationBatchResult:
        """Wait for the copy of the results. Raises what the forward raised."""
        return self._future.result().wait()
