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

import torch
from torch import Tensor

from sgviz.worker.host_result import to_result
from sgviz.worker.protocol import GenerationBatchResult
from sgviz.worker.sampler import Sampled
from sgviz.worker.sampling_batch import SamplingBatch


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A forward that was enqueued: `host` holds the results once `copied` has passed."""

    host: Sampled
    sampling: SamplingBatch
    bid: int
    forward_pass_id: int
    anchor: torch.cuda.Event
    anchor_ns: int
    started: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event

    def wait(self) -> GenerationBatchResult:
        self.copied.synchronize()
        return to_result(
            self.host,
            self.sampling,
            self.bid,
            self.forward_pass_id,
            self._at(self.started),
            self._at(self.ended),
        )

    def _at(self, event: torch.cuda.Event) -> int:
        """The event's time on the host's monotonic clock, counted from the anchor."""
        return self.anchor_ns + int(self.anchor.elapsed_time(event) * 1e6)


class CudaStreams:
    """The streams of one worker."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # weights and pools were written on the default stream
        self._forward = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(self._forward)
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()

    def begin(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.Event, Tensor]:
        """Enqueue the first half of a forward whose sampling waits; what it gave, and the event of its start."""
        started = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._forward):
            started.record(self._forward)
            return started, work()

    def run(
        self,
        work: Callable[[], Sampled],
        sampling: SamplingBatch,
        bid: int,
        forward_pass_id: int,
        started: torch.cuda.Event | None = None,
    ) -> InFlight:
        """Enqueue `work` and the copy of what it sampled; `started`: of the half that `begin` enqueued."""
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
            bid=bid,
            forward_pass_id=forward_pass_id,
            anchor=self._anchor,
            anchor_ns=self._anchor_ns,
            started=first,
            ended=ended,
            copied=copied,
        )

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
