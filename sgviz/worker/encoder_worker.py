"""EncoderWorker: a worker for models that only make vectors of whole prompts (BERT). No KV, no sampler, no graph.

The slots that the scheduler hands out are its measure of how much runs together; no memory lies behind them.
SGLang's TpModelWorker runs encoders too, over a KV pool that nobody reads.
Imports: config, errors, model, worker, torch.
"""

from __future__ import annotations

from pathlib import Path

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.config import Settings
from sgviz.errors import BadRequest, ConfigError
from sgviz.messages.embedding import EmbeddingSpec
from sgviz.model.bert import BertModel
from sgviz.model.pooler import Pooler
from sgviz.worker.cuda_stream import CudaStreams
from sgviz.worker.embedding_forward import EmbeddingForward
from sgviz.worker.encoder_info import encoder_info
from sgviz.worker.model_runner import resolve_device, resolve_dtype
from sgviz.worker.protocol import Launch, NewWeights
from sgviz.worker.stream import CpuStream
from sgviz.worker.torch_threads import TorchThreads


class EncoderWorker:
    """Loads the encoder in folder `path` and runs its batches; satisfies `worker.protocol.Worker`.

    Raises:
        StartupError, ConfigError: the model cannot be loaded, or a setting does not fit it. Nothing is left behind.
    """

    def __init__(self, path: Path, settings: Settings, spec: EmbeddingSpec, gpu: int = 0) -> None:
        if settings.model.quantization is not None:
            raise ConfigError(
                f"quantization {settings.model.quantization!r} is for generating models; leave it out for an encoder",
                param="quantization",
            )
        device = resolve_device(settings.model.device, gpu)
        dtype = resolve_dtype(settings.model.dtype, device)
        model = BertModel.load(path, dtype, device)
        self.info = encoder_info(
            path,
            settings,
            spec,
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            weight_bytes=model.weight_bytes,
        )
        cuda = CudaStreams(device) if device.type == "cuda" else None
        self._stream = CpuStream("sgviz-forward")
        self._forward = EmbeddingForward(model.forward, Pooler(spec), device, self._stream, cuda)
        self._launched = 0
        threads = settings.model.torch_threads
        self._threads = None if threads is None else TorchThreads(threads)
        if self._threads is not None:
            self._stream.submit(self._threads.set).result()

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        """There is one way. Raises BadBatch for a batch whose lists disagree, Unavailable after `close`."""
        return self.forward_batch_embedding(batch)

    def forward_batch_embedding(self, batch: ScheduleBatch) -> Launch:
        """Start the forward of `batch`: an EmbeddingBatchResult."""
        self._launched += 1
        return self._forward.launch(batch, self._launched)

    def forget(self, rows: list[int]) -> None:
        """Whole prompts leave nothing behind."""

    def load_weights(self, model_path: str) -> NewWeights:
        """Refused."""
        raise BadRequest("the weights of an encoder cannot be replaced while it runs", param="model_path")

    def close(self) -> None:
        if self._threads is not None:
            threads, self._threads = self._threads, None
            self._stream.submit(threads.restore).result()
        self._stream.close()
