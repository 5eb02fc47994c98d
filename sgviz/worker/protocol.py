"""The border between scheduler and device: `launch` returns at once, `Launch.result()` waits.

A worker executes launches in order on its *stream* (a thread on CPU, a CUDA stream on a GPU, a timer for
a simulated device). The scheduler's thread builds the ForwardBatch inside `launch`, so whatever it changes
afterwards in requests, rows or pools does not reach a forward that is under way. Decode inputs come from
the FutureMap on the device's side, so the scheduler never waits for a token's value.
Mirrors SGLang's TpModelWorker / GenerationBatchResult. Imports: batch (no torch here).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sgviz.batch.input_logprobs import InputLogprobs, Pairs
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.req_kv import Slots
from sgviz.messages.embedding import EmbeddingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What the scheduler must know of model and memory before it can plan.

    Attributes:
        max_total_num_tokens: KV slots of the pool (slot 0 not counted).
        context_len: positions the model can address.
        eos_token_ids: ids that end an answer (model and generation config together).
        bytes_per_token: KV bytes one token costs, all layers.
        simulated: times come from a cost model, tokens from a rule.
        embedding: how it makes vectors of prompts; None: it does not.
        is_generation: it generates tokens. is_encoder: whole prompts only, and no KV behind the slots.
    """

    model: str
    vocab_size: int
    context_len: int
    max_total_num_tokens: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    num_layers: int = 0
    bytes_per_token: int = 0
    weight_bytes: int = 0
    simulated: bool = False
    embedding: EmbeddingSpec | None = None
    is_generation: bool = True

    @property
    def is_encoder(self) -> bool:
        return self.embedding is not None and self.embedding.is_encoder


@dataclass(slots=True, kw_only=True)
class DeviceTimes:
    """When the device did what for one batch: by its own clock, put on the host's monotonic one (ns).

    Attributes:
        start_ns, end_ns: the batch, from its first operation to the last of its sampling.
        forward_end_ns: the logits are there. A decode graph takes the argmax too, which is then in the forward.
        sample_start_ns: the same moment, or a later one where the sampling was delayed: the device waits in between.
        copy_start_ns, copy_end_ns: the results go to the host. On a GPU that has a stream of its own, beside the next
            forward; on a CPU they are there already, and lists are made of them.

    Of the last four, 0 says that the worker does not tell: the mock device has no such parts, and the simulated one
    a cost for the whole only, with the sampling in it and the copy left out.
    """

    start_ns: int
    end_ns: int
    forward_end_ns: int = 0
    sample_start_ns: int = 0
    copy_start_ns: int = 0
    copy_end_ns: int = 0


@dataclass(frozen=True, slots=True)
class ProcessorFailure:
    """Why a logit processor gave no logits. `is_refusal`: it does not take the request's custom_params."""

    why: str
    is_refusal: bool = False


@dataclass(slots=True, kw_only=True)
class GenerationBatchResult(DeviceTimes):
    """What a forward gave, in the order of the batch's requests.

    Attributes:
        next_token_ids: one a request; the entry of an unfinished chunk is not to be used.
        logprobs: natural log of the chosen token's probability by request, or None if nobody asked.
        top_logprobs: by request `(logprob, token id)`, best first; empty for those who did not ask.
        token_ids_logprobs: by request, of the ids that it asked for, or None if nobody asked.
        input_logprobs: by request, of the prompt tokens that follow positions of this forward, or None likewise.
        failures: why members (by their place) have no token: their logit processor failed. The others have theirs.
        nan_members: members (by their place) whose logits held a NaN. Neither their token nor the KV that this forward
            wrote for them means anything.
        can_run_cuda_graph: the device replayed a captured CUDA graph.
    """

    bid: int
    next_token_ids: list[int]
    forward_pass_id: int
    logprobs: list[float] | None = None
    top_logprobs: list[Pairs] | None = None
    token_ids_logprobs: list[Pairs] | None = None
    input_logprobs: list[InputLogprobs | None] | None = None
    failures: dict[int, ProcessorFailure] = field(default_factory=dict)
    nan_members: list[int] = field(default_factory=list)
    can_run_cuda_graph: bool = False


@dataclass(slots=True, kw_only=True)
class EmbeddingBatchResult(DeviceTimes):
    """What a prefill-only forward gave, in the order of the batch's requests.

    Attributes:
        embeddings: a vector each, little-endian float32 as bytes; empty for an unfinished chunk.
    """

    bid: int
    embeddings: list[bytes]
    forward_pass_id: int
    can_run_cuda_graph: bool = False


BatchResult = GenerationBatchResult | EmbeddingBatchResult


class Launch(Protocol):
    """A forward under way."""

    bid: int
    forward_pass_id: int

    def done(self) -> bool: ...

    def sample(self) -> None:
        """Begin the sampling that `launch(..., delay_sample=True)` left out; nothing to do for other launches."""
        ...

    def result(self) -> BatchResult:
        """Wait for the forward: an EmbeddingBatchResult if the batch is one for vectors.

        Raises what the forward raised, SgvizError if its sampling was never begun.
        """
        ...


class NewWeights(Protocol):
    """Weights on their way from the disk, beside the forwards."""

    def done(self) -> bool: ...

    def install(self) -> None:
        """Wait for them and let them take the place of the old ones, behind the forwards that were launched.

        Raises SgvizError if they cannot be read or do not fit; the old ones are whole and go on then.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How the KV of a token looks when it travels.

    Attributes:
        tag: number format and shape; two workers can exchange KV if they agree in it.
        wire_bytes: of one token as it is copied. nominal_bytes: as a model of that shape would have (a simulated device
            copies less than it stands for).
    """

    tag: str
    wire_bytes: int
    nominal_bytes: int


class KVCopy(Protocol):
    """A copy of KV under way on the stream."""

    def done(self) -> bool: ...

    def on_done(self, call: Callable[[], None]) -> None:
        """`call` when it is done, on any thread; never, if only the clock knows when that is."""
        ...

    def result(self) -> tuple[int, int]:
        """Wait for it: when it began and ended (monotonic ns). Raises what it raised."""
        ...


class MovesKV(Protocol):
    """A worker whose KV can go to another one; a token's KV is the same wherever its slot is."""

    kv_layout: KVLayout

    def read_kv(self, slots: Slots, out: memoryview) -> KVCopy:
        """Copy the KV of `slots` [n] into `out` [n * wire_bytes], behind the launched forwards.

        The bytes are layer by layer: [layers, K and V, KV heads, n, head_dim] of a real model.
        """
        ...

    def write_kv(self, slots: Slots, data: memoryview) -> KVCopy:
        """Copy what `read_kv` gave, of as many tokens, into `slots`, before the forwards launched later."""
        ...

    def prime(self, rows: list[int], tokens: list[int]) -> None:
        """These tokens were sampled elsewhere: the next forward of the rows goes on from them."""
        ...


class Worker(Protocol):
    """Anything that can run a ScheduleBatch."""

    info: WorkerInfo

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        """Start the forward of `batch` behind those already launched, and return at once.

        A batch with `is_embedding` goes the worker's `forward_batch_embedding`, where nothing is sampled.

        Args:
            delay_sample: compute the logits, but sample only when `Launch.sample` is called. Nothing else may be
                launched before that.
        """
        ...

    def forget(self, rows: list[int]) -> None:
        """The rows are free again: drop what the device keeps for them (penalty counts, ...)."""
        ...

    def load_weights(self, model_path: str) -> NewWeights:
        """Begin to load other weights of the same model. Raises BadRequest if the device has none."""
        ...

    def close(self) -> None:
        """Stop the stream; launches under way are finished first."""
        ...
