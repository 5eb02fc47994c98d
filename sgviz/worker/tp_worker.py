"""TpModelWorker: the real worker. ScheduleBatch in, sampled tokens out, in launch order on one stream.

`launch` copies what the forward needs (BatchSnapshot, SamplingBatch, ForwardBatch) in the scheduler's thread.
On the stream: decode inputs from the FutureMap, forward, sample, store in the FutureMap, copy to the host.
The same class serves the normal and the overlap loop, CPU and CUDA. Mirrors SGLang's TpModelWorker and its
overlap client; simplified: one rank. Imports: batch, model, worker, torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sgviz.batch.asked_positions import AskedPositions, asked_positions
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.batch.vocab_mask import Constrained, constrained_members, fill_vocab_mask
from sgviz.cache.req_kv import Slots
from sgviz.messages.embedding import EmbeddingSpec
from sgviz.model.decode_graph import DecodeInputs
from sgviz.model.fetch import resolve_model
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.model_config import Quantization
from sgviz.model.pooler import Pooler
from sgviz.worker.cuda_stream import Begun, CudaLaunch, CudaStreams, InFlight
from sgviz.worker.embedding_forward import EmbeddingForward
from sgviz.worker.forward_inputs import forward_batch_of, moved
from sgviz.worker.future_map import FutureMap
from sgviz.worker.host_result import Pass, to_result
from sgviz.worker.input_part import InputPart
from sgviz.worker.kv_copy import StreamCopy
from sgviz.worker.kv_moves import KVMoves, layout_of
from sgviz.worker.logit_processors import LogitProcessors
from sgviz.worker.model_runner import Loaded, MemoryPlan, ModelRunner, resolve_device, resolve_dtype
from sgviz.worker.protocol import GenerationBatchResult, Launch, WorkerInfo
from sgviz.worker.sampler import Sampled, Sampler
from sgviz.worker.sampling_batch import SamplingBatch
from sgviz.worker.snapshot import BatchSnapshot
from sgviz.worker.stream import CpuStream, DelayedLaunch, WorkerLaunch
from sgviz.worker.torch_threads import TorchThreads
from sgviz.worker.weights import WeightsOnTheWay


@dataclass(slots=True, kw_only=True)
class _Work:
    """One launch as the stream sees it; nothing in it follows the scheduler.

    `graph_inputs`: set if the decode graph runs it. `logits`, `best` (their argmax, from the graph), `begun` (on CUDA),
    `start_ns` and `forward_end_ns` (on CPU), `error`: what the forward left for the sampling. `delayed`: that waits.
    `asked`: the prompt positions whose log-probabilities are wanted, `inputs`: what the forward gave of them.
    `constrained`: the members under a grammar; the scheduler's thread alone looks at them.
    """

    of: Pass
    forward: ForwardBatch
    sampling: SamplingBatch
    rows: Tensor
    last_row: int
    decode_rows: int
    constrained: Constrained = ()
    asked: list[AskedPositions] = field(default_factory=list)
    inputs: list[InputPart] = field(default_factory=list)
    graph_inputs: DecodeInputs | None = None
    best: Tensor | None = None
    logits: Tensor | None = None
    begun: Begun | None = None
    start_ns: int = 0
    forward_end_ns: int = 0
    delayed: bool = False
    error: Exception | None = None


class TpModelWorker:
    """Loads a model and runs its batches; satisfies `worker.protocol.Worker`.

    Args:
        model_path: name, folder or hub id, as `resolve_model` takes it.
        quantization: "w8a8_int8" or None.
        dtype, device: "auto" or a name; see `resolve_dtype` and `resolve_device`. gpu: which one, if it is a GPU.
        max_total_tokens: KV slots, rounded down to pages; None: what memory allows.
        max_running_requests: bounds the KV pool on small models, where memory does not.
        context_length: at most the model's own.
        torch_threads: threads of torch's operators, in the whole process until `close`; None: torch's choice.
        random_seed: for requests that bring no seed.
        logit_processors: what requests may name; None: nothing.
        embedding: how it makes vectors; None: it does not. is_generation: False: vectors are all it is for.

    Raises:
        StartupError, ConfigError: see ModelRunner. Nothing is left behind then.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        quantization: Quantization | None = None,
        device: str = "auto",
        gpu: int = 0,
        max_total_tokens: int | None = None,
        page_size: int = 1,
        max_running_requests: int | None = None,
        context_length: int | None = None,
        torch_threads: int | None = None,
        random_seed: int = 42,
        mem_fraction_static: float = 0.85,
        embedding: EmbeddingSpec | None = None,
        is_generation: bool = True,
        logit_processors: LogitProcessors | None = None,
    ) -> None:
        self.device = resolve_device(device, gpu)
        memory = MemoryPlan(
            max_total_tokens=max_total_tokens,
            page_size=page_size,
            max_running_requests=max_running_requests,
            mem_fraction_static=mem_fraction_static,
        )
        wanted = resolve_dtype(dtype, self.device)
        self._stream = CpuStream("sgviz-forward")
        self._threads = None if torch_threads is None else TorchThreads(torch_threads)
        self.runner = self._on_stream(
            lambda: ModelRunner(
                resolve_model(model_path),
                dtype=wanted,
                device=self.device,
                memory=memory,
                context_length=context_length,
                quantization=quantization,
            )
        )
        self.info = replace(self._describe(), embedding=embedding, is_generation=is_generation)
        self._random_seed = random_seed
        self._sampler = Sampler(self.info.vocab_size, self.device, logit_processors)
        self._future_map = FutureMap(device=self.device)
        self._sampling: SamplingBatch | None = None
        self._cuda = CudaStreams(self.device) if self.device.type == "cuda" else None
        self._embedding = self._embedding_forward(embedding) if embedding is not None else None
        self.kv_layout = layout_of(self.runner.kv_pool, self.runner.config.mark)
        enqueue = self._cuda.enqueue if self._cuda is not None else None
        self._moves = KVMoves(lambda: self.runner.kv_pool, self._stream, enqueue)

    def _on_stream(self, build: Callable[[], ModelRunner]) -> ModelRunner:
        """Build the runner in the thread that will run it, so that only one thread owns a team of OpenMP's.

        With a second team there are more threads than cores in OpenMP's books, and every operator ends in a sleep.
        """

        def call() -> ModelRunner:
            if self._threads is not None:
                self._threads.set()
            return build()

        try:
            return self._stream.submit(call).result()
        except BaseException:
            self.close()
            raise

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        """Start the forward of `batch` behind those already launched.

        Raises BadBatch for a batch whose lists disagree, Unavailable after `close`.
        """
        if batch.is_embedding:
            return self.forward_batch_embedding(batch)
        work = self._snapshot(batch)
        if not delay_sample and not work.constrained:
            return self._submit(work)
        work.delayed = True  # with grammars always: their masks are filled while the forward runs
        self._stream.submit(lambda: self._run_forward(work))
        launch = DelayedLaunch(work.of.bid, work.of.forward_pass_id, lambda: self._submit(work))
        if not delay_sample:
            launch.sample()
        return launch

    def forward_batch_embedding(self, batch: ScheduleBatch) -> Launch:
        """Start a prefill-only forward, whose result is an EmbeddingBatchResult."""
        assert self._embedding is not None, "the TokenizerManager refuses such requests"
        return self._embedding.launch(batch, self.runner.take_forward_pass_id())

    def _embedding_forward(self, spec: EmbeddingSpec) -> EmbeddingForward:
        def hidden(batch: ForwardBatch) -> Tensor:  # the runner's model may be replaced
            return self.runner.model.forward_hidden(batch, self.runner.attention)

        return EmbeddingForward(hidden, Pooler(spec), self.device, self._stream, self._cuda)

    def _submit(self, work: _Work) -> Launch:
        """Put the forward, or what is left of it, on the stream."""
        if work.constrained:
            mask = fill_vocab_mask(work.constrained, self.info.vocab_size, self.info.eos_token_ids)
            work.sampling = replace(work.sampling, vocab_mask=mask)
        cuda, bid, number = self._cuda, work.of.bid, work.of.forward_pass_id
        if cuda is None:
            return WorkerLaunch(bid, number, self._stream.submit(lambda: self._run_on_cpu(work)))
        return CudaLaunch(bid, number, self._stream.submit(lambda: self._run_on_cuda(work, cuda)))

    def forget(self, rows: list[int]) -> None:
        """Drop penalty counts and last tokens of free rows, behind the forwards that may still use them."""
        cuda = self._cuda
        if cuda is None:
            self._stream.submit(lambda: self._forget(rows))
        else:
            self._stream.submit(lambda: cuda.enqueue(lambda: self._forget(rows)))

    def read_kv(self, slots: Slots, out: memoryview) -> StreamCopy:
        return self._moves.read_kv(slots, out)

    def write_kv(self, slots: Slots, data: memoryview) -> StreamCopy:
        return self._moves.write_kv(slots, data)

    def prime(self, rows: list[int], tokens: list[int]) -> None:
        """The rows go on from these tokens, in the forwards launched later."""
        cuda = self._cuda
        if cuda is None:
            self._stream.submit(lambda: self._prime(rows, tokens))
        else:
            self._stream.submit(lambda: cuda.enqueue(lambda: self._prime(rows, tokens)))

    def load_weights(self, model_path: str) -> WeightsOnTheWay:
        """Load beside the forwards; see `worker.weights`."""
        return WeightsOnTheWay(self.runner, model_path, self._put)

    def _put(self, loaded: Loaded) -> None:
        self._stream.submit(lambda: self.runner.put(loaded)).result()
        self.info = replace(self.info, model=loaded.config.facts.name)

    def close(self) -> None:
        if self._threads is not None:
            threads, self._threads = self._threads, None
            self._stream.submit(threads.restore).result()
        self._stream.close()
        if hasattr(self, "_moves"):  # close is called too if the model could not be loaded
            self._moves.close()
        if hasattr(self, "runner"):
            self.runner.let_go()

    def _describe(self) -> WorkerInfo:
        runner = self.runner
        return WorkerInfo(
            model=runner.facts.name,
            vocab_size=runner.facts.vocab_size,
            context_len=runner.context_len,
            max_total_num_tokens=runner.kv_pool.size,
            eos_token_ids=runner.facts.eos_token_ids,
            device=runner.device.type,
            dtype=str(runner.dtype).removeprefix("torch."),
            num_layers=runner.facts.num_layers,
            bytes_per_token=runner.kv_pool.bytes_per_token,
            weight_bytes=runner.weight_bytes,
        )

    def _snapshot(self, batch: ScheduleBatch) -> _Work:
        taken = BatchSnapshot.take(batch)
        self._sampling = SamplingBatch.from_batch(
            batch,
            eos_token_ids=self.info.eos_token_ids,
            random_seed=self._random_seed,
            previous=self._sampling,
        )
        forward = forward_batch_of(taken)
        work = _Work(
            of=Pass(
                bid=taken.bid,
                forward_pass_id=self.runner.take_forward_pass_id(),
                can_run_cuda_graph=self.runner.can_run_cuda_graph,
            ),
            forward=forward,
            sampling=self._sampling,
            rows=torch.from_numpy(taken.rows),
            last_row=int(taken.rows.max(initial=0)),
            decode_rows=taken.decode_rows,
            constrained=constrained_members(batch),
            asked=asked_positions(batch) if batch.return_logprob else [],
        )
        graph = self.runner.decode_graph
        if graph is not None and taken.forward_mode.is_decode and len(taken.rows):
            work.graph_inputs = graph.prepare(forward, work.rows)
        return work

    # Everything below runs on the stream.

    def _run_forward(self, work: _Work) -> None:
        """The half before a delayed sampling. What it raises is raised by whoever waits for the sampling."""
        try:
            self._forward(work)
        except Exception as error:
            work.error = error

    def _forward(self, work: _Work) -> None:
        if self._cuda is not None:
            work.begun, work.logits = self._cuda.begin(lambda: self._logits(work))
            return
        work.start_ns = time.monotonic_ns()
        work.logits = self._logits(work)
        work.forward_end_ns = time.monotonic_ns()

    def _end_forward(self, work: _Work) -> None:
        """It has run, now or before. Raises what it raised."""
        if work.error is not None:
            raise work.error
        if work.logits is None:
            self._forward(work)

    def _run_on_cpu(self, work: _Work) -> GenerationBatchResult:
        self._end_forward(work)
        sample_start = time.monotonic_ns() if work.delayed else work.forward_end_ns
        sampled = self._sample(work)
        end = time.monotonic_ns()
        result = to_result(sampled, work.sampling, work.of, work.start_ns, end)
        result.forward_end_ns, result.sample_start_ns = work.forward_end_ns, sample_start
        result.copy_start_ns, result.copy_end_ns = end, time.monotonic_ns()
        return result

    def _run_on_cuda(self, work: _Work, cuda: CudaStreams) -> InFlight:
        self._end_forward(work)
        assert work.begun is not None
        return cuda.finish(
            work.begun, lambda: self._sample(work), work.sampling, work.of, delayed=work.delayed
        )

    @torch.inference_mode()
    def _sample(self, work: _Work) -> Sampled:
        assert work.logits is not None
        if work.best is not None and work.sampling.plain:
            return Sampled(tokens=work.best)
        sampled = self._sampler.sample(work.logits, work.sampling)
        sampled.inputs = work.inputs
        if sampled.nan_members:
            self._wash(work, sampled.nan_members)
        self._future_map.store(work.rows.to(self.device), sampled.tokens)
        return sampled

    def _wash(self, work: _Work, members: list[int]) -> None:
        """Leave no NaN of `members` in the pool: whoever gets their slots would meet it behind a mask.

        The pieces of a prompt that is being cut stay as they are, so that whoever shares them fails as well.
        """
        forward = work.forward
        for i in members:
            if work.sampling.final[i]:
                start = forward.starts[i]
                slots = forward.out_cache_loc[start : start + forward.extend_lens[i]]
                self.runner.kv_pool.wash(slots.to(self.device))

    @torch.inference_mode()
    def _logits(self, work: _Work) -> Tensor:
        self._future_map.reserve(work.last_row)
        if work.graph_inputs is not None:
            return self._logits_of_graph(work, work.graph_inputs)
        batch, rows = moved(work.forward, self.device), work.rows.to(self.device)
        batch.input_ids = self._future_map.resolve(batch.input_ids, rows[len(rows) - work.decode_rows :])
        if not work.asked:
            return self.runner.forward(batch)
        logits, work.inputs = self.runner.forward_with_inputs(batch, work.asked)
        return logits

    def _logits_of_graph(self, work: _Work, inputs: DecodeInputs) -> Tensor:
        """The graph has put the argmax into the FutureMap, which is all that plain rows want."""
        assert self.runner.decode_graph is not None
        out = self.runner.decode_graph.run(self._future_map.output_tokens_buf, inputs)
        if out.unknown:
            self._future_map.resolve(inputs.rows[:0], inputs.rows)  # raises, and names the row
        work.best = None if out.nan else out.tokens
        return out.logits

    @torch.inference_mode()
    def _prime(self, rows: list[int], tokens: list[int]) -> None:
        self._future_map.reserve(max(rows))
        to = self.device
        self._future_map.store(torch.tensor(rows, device=to), torch.tensor(tokens, device=to))

    @torch.inference_mode()
    def _forget(self, rows: list[int]) -> None:
        self._sampler.forget(rows)
        if self._embedding is not None:
            self._embedding.forget(rows)
        known = [row for row in rows if row < len(self._future_map)]
        self._future_map.forget(torch.tensor(known, dtype=torch.int64, device=self.device))
