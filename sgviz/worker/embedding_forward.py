"""The prefill-only half of the real worker: hidden states of a batch, pooled, as an EmbeddingBatchResult.

Nothing is sampled and no row gets a last token. Mirrors `forward_batch_embedding` of SGLang's TpModelWorker.
Simplified on a GPU: the stream's thread waits for the vectors, so launches behind them are enqueued only then.
Imports: batch, model, worker, torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.pooler import Pooled, Pooler, to_host
from sgviz.worker.cuda_stream import CudaStreams
from sgviz.worker.forward_inputs import forward_batch_of, moved
from sgviz.worker.protocol import EmbeddingBatchResult
from sgviz.worker.snapshot import BatchSnapshot
from sgviz.worker.stream import Stream, WorkerLaunch

Hidden = Callable[[ForwardBatch], Tensor]


@dataclass(frozen=True, slots=True)
class _Work:
    """One launch as the stream sees it; nothing in it follows the scheduler."""

    bid: int
    number: int
    forward: ForwardBatch
    members: list[Pooled]


class EmbeddingForward:
    """Runs batches for vectors on a worker's stream.

    Args:
        hidden: [T, hidden] float32 states of a batch, behind the final norm.
        cuda: where the kernels go on a GPU; None: on a CPU.
    """

    def __init__(
        self,
        hidden: Hidden,
        pooler: Pooler,
        device: torch.device,
        stream: Stream,
        cuda: CudaStreams | None = None,
    ) -> None:
        self._hidden = hidden
        self._pooler = pooler
        self._device = device
        self._stream = stream
        self._cuda = cuda

    def launch(self, batch: ScheduleBatch, number: int) -> WorkerLaunch[EmbeddingBatchResult]:
        """Start the forward; `number` is its forward_pass_id. Raises as `Worker.launch`."""
        taken = BatchSnapshot.take(batch)
        work = _Work(taken.bid, number, forward_batch_of(taken), pooled_members(batch))
        run = self._run if self._cuda is None else self._run_on_cuda
        return WorkerLaunch(work.bid, number, self._stream.submit(lambda: run(work)))

    def forget(self, rows: list[int]) -> None:
        """Runs on the stream: the rows are free again."""
        self._pooler.forget(rows)

    # Everything below runs on the stream.

    def _run_on_cuda(self, work: _Work) -> EmbeddingBatchResult:
        results: list[EmbeddingBatchResult] = []
        assert self._cuda is not None
        self._cuda.enqueue(lambda: results.append(self._run(work)))
        return results[0]

    @torch.inference_mode()
    def _run(self, work: _Work) -> EmbeddingBatchResult:
        self._synchronize()
        start = time.monotonic_ns()
        hidden = self._hidden(moved(work.forward, self._device))
        self._synchronize()
        forward_end = time.monotonic_ns()
        vectors = self._pooler.forward(hidden, work.members)
        self._synchronize()
        end = time.monotonic_ns()
        return EmbeddingBatchResult(
            bid=work.bid,
            embeddings=to_host(vectors),
            forward_pass_id=work.number,
            start_ns=start,
            end_ns=end,
            forward_end_ns=forward_end,
            sample_start_ns=forward_end,
            copy_start_ns=end,
            copy_end_ns=time.monotonic_ns(),
        )

    def _synchronize(self) -> None:
        """On a GPU: what was enqueued before has run, so that the stamps are the device's."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def pooled_members(batch: ScheduleBatch) -> list[Pooled]:
    """The members as the Pooler sees them."""
    return [
        Pooled(
            row=req.kv.req_pool_idx,
            prefix=prefix,
            extend=extend,
            goes_on=req is batch.chunked_req,
            dimensions=req.dimensions,
        )
        for req, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens)
    ]
