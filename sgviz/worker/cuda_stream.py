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


@dataclass(slots=True)
class Begun:
    """A forward whose matrices were enqueued: the events around them, and the anchor that their times count from."""

    anchor: Anchor
    started: torch.cuda.Event
    ended: torch.cuda.Event


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A batch that was enqueued: `host` holds the results once `copied` has passed.

    `sampling_from` is the event that ends the forward, unless the sampling was delayed.
    """

    host: Sampled
    sampling: SamplingBatch
    of: Pass
    begun: Begun
    sampling_from: torch.cuda.Event
    ended: torch.cuda.Event
    copying: torch.cuda.Event
    copied: torch.cuda.Event

    def wait(self) -> GenerationBatchResult:
        self.copied.synchronize()
        at, begun = self.begun.anchor.at, self.begun
        result = to_result(self.host, self.sampling, self.of, at(begun.started), at(self.ended))
        result.forward_end_ns = at(begun.ended)
        result.sample_start_ns = (
            result.forward_end_ns if self.sampling_from is begun.ended else at(self.sampling_from)
        )
        result.copy_start_ns, result.copy_end_ns = at(self.copying), at(self.copied)
        return result


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

    def begin(self, work: Callable[[], Tensor]) -> tuple[Begun, Tensor]:
        """Enqueue a forward without its sampling; the logits."""
        begun = Begun(self._anchors.current(), _timed(), _timed())
        with torch.cuda.stream(self._forward):
            begun.started.record(self._forward)
            logits = work()
            begun.ended.record(self._forward)
        return begun, logits

    def finish(
        self, begun: Begun, work: Callable[[], Sampled], sampling: SamplingBatch, of: Pass, *, delayed: bool
    ) -> InFlight:
        """Enqueue the sampling `work` behind what `begin` enqueued, and the copy of what it gives.

        Args:
            delayed: the host held it back, so it has a start of its own.
        """
        sampling_from = _timed() if delayed else begun.ended
        ended, copying, copied = _timed(), _timed(), _timed()
        with torch.cuda.stream(self._forward):
            if delayed:
                sampling_from.record(self._forward)
            sampled = work()
            ended.record(self._forward)
        self._copy.wait_event(ended)
        with torch.cuda.stream(self._copy):
            copying.record(self._copy)
            host = sampled.moved(self._to_host)
            copied.record(self._copy)
        return InFlight(
            host=host,
            sampling=sampling,
            of=of,
            begun=begun,
            sampling_from=sampling_from,
            ended=ended,
            copying=copying,
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


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


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
