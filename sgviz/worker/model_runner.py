"""ModelRunner: the model, its KV tensors and its attention backend; ForwardBatch in, logits out.

Mirrors SGLang's ModelRunner; on a CPU its traced decode step stands where SGLang has CUDA graphs. Simplified: no
CUDA graphs, no tensor parallelism.
Imports: batch, model, worker.kv_budget, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgviz.batch.asked_positions import AskedPositions
from sgviz.batch.forward_mode import ForwardMode
from sgviz.config import DEFAULT_MAX_RUNNING
from sgviz.errors import ConfigError
from sgviz.model.attention import AttentionBackend, TorchAttention
from sgviz.model.decode_graph import DecodeGraph
from sgviz.model.decoder import CausalLM
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.model.loader import DTYPES, load_model
from sgviz.model.model_config import DecoderConfig, Quantization, load_config
from sgviz.model.registry import model_class
from sgviz.worker.input_logprobs import input_parts
from sgviz.worker.input_part import InputPart
from sgviz.worker.kv_budget import (
    CPU_KV_BYTES,
    bytes_per_token,
    kv_tokens,
    usable_context,
)
from sgviz.worker.torch_threads import one_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How much KV to take; see CacheConfig for the meaning of the settings."""

    max_total_tokens: int | None = None
    page_size: int = 1
    max_running_requests: int | None = None
    mem_fraction_static: float = 0.85


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model over a runner's KV pool, with its decode step in one piece where it has one."""

    config: DecoderConfig
    model: CausalLM
    decode_graph: DecodeGraph | None


class ModelRunner:
    """Runs the forwards of one stream.

    Attributes:
        forward_pass_id: number of the newest forward; whoever plans one takes the next.
        decode_graph: the decode step in one piece, for float32 on a CPU, else None.
        can_run_cuda_graph: whether its decode steps replay a CUDA graph: never, so far.
        context_len: positions a request may use.
    """

    can_run_cuda_graph = False

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: MemoryPlan,
        context_length: int | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Load the model and take the KV memory.

        Raises:
            StartupError: the model cannot be loaded. ConfigError: no room for KV, or a context length that
            the model does not have.
        """
        self.config = load_config(folder)
        self.facts = self.config.facts
        self.dtype = dtype
        self.device = device
        self._quantization = quantization
        self.context_len = usable_context(context_length, self.facts.context_len)
        self.model = self._load_model(folder)
        self.kv_pool = self._take_memory(memory)
        self.attention: AttentionBackend = TorchAttention(self.kv_pool)
        self.decode_graph = self._graph_of(self.model)
        self.forward_pass_id = 0

    def load(self, folder: Path) -> Loaded:
        """The model in `folder` as this runner would run it; what runs is not touched. Raises StartupError."""
        with one_thread():  # another thread than the stream's
            model = self._load_model(folder)
            return Loaded(load_config(folder), model, self._graph_of(model))

    def put(self, loaded: Loaded) -> None:
        """Run `loaded` from now on. On the stream, between two forwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # it was loaded on another stream
        self.config, self.facts = loaded.config, loaded.config.facts
        self.model, self.decode_graph = loaded.model, loaded.decode_graph

    def let_go(self) -> None:
        """Free the KV memory, after the last forward; the weights go when Python finds the ring that torch.jit made."""
        if self.decode_graph is not None:
            self.decode_graph.let_go()
            self.decode_graph = None
        for name in ("model", "kv_pool", "attention"):
            vars(self).pop(name, None)

    def _load_model(self, folder: Path) -> CausalLM:
        return load_model(folder, self.dtype, self.device, quantization=self._quantization).eval()

    def _graph_of(self, model: CausalLM) -> DecodeGraph | None:
        graphable = self.device.type == "cpu" and self.dtype is torch.float32
        return DecodeGraph(model, self.kv_pool) if graphable else None

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in memory, shared ones once, whatever layout they were packed into."""
        empty = model_class(self.facts.architecture)(self.config, self.dtype, "meta")
        large, narrow = self.dtype.itemsize, 1 if self.model.quantization else self.dtype.itemsize
        return sum(
            weight.numel() * (narrow if ".layers." in name and weight.dim() == 2 else large)
            for name, weight in empty.named_parameters()
        )

    def take_forward_pass_id(self) -> int:
        self.forward_pass_id += 1
        return self.forward_pass_id

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[B, vocab] float32 logits of each request's last new position; KV of all new ones is written.

        Extend, decode and mixed are one call: a decoding request is an extend of one, and the attention backend
        looks at the lengths. An idle batch has no positions, so there is nothing to compute.
        """
        if batch.forward_mode is ForwardMode.IDLE:
            return torch.empty((0, self.facts.vocab_size), dtype=torch.float32, device=self.device)
        logits: Tensor = self.model.forward(batch, self.attention)
        return logits

    @torch.inference_mode()
    def forward_with_inputs(
        self, batch: ForwardBatch, asked: Sequence[AskedPositions]
    ) -> tuple[Tensor, list[InputPart]]:
        """`forward`, and the log-probabilities of the prompt tokens that somebody asked for."""
        model = self.model
        self.attention.prepare(batch)
        hidden = model.hidden(batch.input_ids, batch.positions, self.attention)
        parts = input_parts(asked, hidden, model.logits, self.facts.vocab_size)
        return model.logits(hidden.index_select(0, batch.logit_rows)), parts

    def _take_memory(self, memory: MemoryPlan) -> MHATokenToKVPool:
        facts = self.facts
        token_bytes = bytes_per_token(facts, self.dtype.itemsize)
        size = kv_tokens(
            max_total_tokens=memory.max_total_tokens,
            page_size=memory.page_size,
            token_bytes=token_bytes,
            host_bytes=token_bytes if self.device.type == "cpu" else 0,
            budget_bytes=_budget(self.device, memory.mem_fraction_static),
            useful_tokens=(memory.max_running_requests or DEFAULT_MAX_RUNNING) * self.context_len,
        )
        return MHATokenToKVPool(
            num_layers=facts.num_layers,
            size=size,
            page_size=memory.page_size,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=self.dtype,
            device=self.device,
        )


def resolve_device(name: str, gpu: int = 0) -> torch.device:
    """The device `name` means, of GPUs that of number `gpu`; "auto" takes one where there is one.

    Raises:
        ConfigError: it is not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda", param="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch finds no usable GPU here; use cpu or auto", param="device")
    if name == "cpu":
        return torch.device(name)
    if gpu >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"GPU {gpu} is not here; torch finds {count}, numbered from 0. dp_size, base_gpu_id and gpu_id_step (0: "
            "all ranks share one) say which are used",
            param="base_gpu_id",
        )
    return torch.device(name, gpu)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype `name` means: "auto" is float32 on CPU, where narrower ones are slower, bfloat16 on a GPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[name]


def _budget(device: torch.device, fraction: float) -> int:
    """Bytes for KV once the weights are loaded."""
    if device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1.0 - fraction)))
