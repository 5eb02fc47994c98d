"""How long a forward takes on a named GPU: a roofline in two parts, plus overheads.

A forward runs kernels one after the other, so the parts add up, and each part is as slow as the slower of its
memory traffic and its arithmetic:

    linear     max(weight bytes / bandwidth, 2 * weights * new tokens / rate)      all matrices
    attention  max(KV bytes read and written / bandwidth, 4 * heads * head_dim * layers * pairs / rate)
    overhead   layers * layer overhead                                            launches, norms, sampling
    all-reduce 2 a layer: latency + 2 (n - 1)/n * new tokens * hidden * itemsize / link bandwidth

With n GPUs (tensor parallel) weights, KV and arithmetic are divided by n. The output matrix is applied to one
row a request. Bandwidth and rate are data-sheet numbers times an achieved share (`hardware.py`).

What one sum over everything would get wrong, and this does not: at a few hundred rows the matrices are bound by
arithmetic while attention is still bound by memory. What this still gets wrong: near the ridge of the roofline
neither limit is reached, so a prompt of some hundred tokens comes out too fast; tensor parallelism of large
batches is better than early engines had it; tile and wave quantization, clocks and power limits are left out.
`python -m sgviz.worker.sim.cost_model` prints published numbers beside the model's and its errors.

SGLang has nothing like it (it measures). Imports: worker.sim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sgviz.errors import ConfigError
from sgviz.worker.sim.hardware import Gpu
from sgviz.worker.sim.models import SimModel
from sgviz.worker.sim.step_work import StepWork

NS = 1e9


class CostModel(Protocol):
    """Anything that knows how long a forward takes."""

    def step_ns(self, work: StepWork) -> int:
        """Nanoseconds on the device."""
        ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one forward by part; `total` is their sum."""

    linear: float
    attention: float
    overhead: float
    allreduce: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.overhead + self.allreduce


class RooflineCost:
    """The cost of `model` on `tp` GPUs of one kind.

    Raises:
        ConfigError: the heads cannot be divided among so many GPUs, or the GPU has no FP8.
    """

    def __init__(self, gpu: Gpu, model: SimModel, tp: int | None = None) -> None:
        self.gpu, self.model, self.tp = gpu, model, model.tp if tp is None else tp
        if self.tp < 1 or model.heads % self.tp or model.kv_heads % min(self.tp, model.kv_heads):
            raise ConfigError(
                f"{model.name} has {model.heads} heads over {model.kv_heads} KV heads; they cannot be divided "
                f"among {self.tp} GPUs",
                param="sim_tp",
            )
        rate = gpu.fp8_flops * gpu.fp8_share if model.itemsize == 1 else gpu.bf16_flops * gpu.flops_share
        if not rate:
            raise ConfigError(f"{gpu.name} has no FP8 arithmetic, {model.name} wants it", param="sim_model")
        self._bandwidth = gpu.bandwidth * gpu.bandwidth_share * self.tp
        self._rate = rate * self.tp
        self._layer_weights = model.layers * model.layer_weights
        self._output_weights = model.vocab * model.hidden
        self._weight_s = model.read_weights * model.itemsize / self._bandwidth
        self._pair_flops = 4 * model.heads * model.head_dim * model.layers
        self._overhead_s = model.layers * gpu.layer_overhead_s

    def step_ns(self, work: StepWork) -> int:
        return int(self.step(work).total * NS)

    def step(self, work: StepWork) -> StepTime:
        """Seconds by part."""
        flops = 2.0 * (self._layer_weights * work.new_tokens + self._output_weights * work.rows)
        kv_bytes = (work.context + work.new_tokens) * self.model.kv_bytes_per_token
        return StepTime(
            linear=max(self._weight_s, flops / self._rate),
            attention=max(kv_bytes / self._bandwidth, self._pair_flops * work.pairs / self._rate),
            overhead=self._overhead_s,
            allreduce=self._allreduce_s(work.new_tokens),
        )

    def _allreduce_s(self, tokens: int) -> float:
        """Two a layer, of the hidden states (bf16 whatever the weights are)."""
        if self.tp == 1:
            return 0.0
        moved = 2 * (self.tp - 1) / self.tp * tokens * self.model.hidden * 2
        once = self.gpu.allreduce_latency_s + moved / (self.gpu.link_bandwidth * self.gpu.bandwidth_share)
        return 2 * self.model.layers * once


if __name__ == "__main__":
    from sgviz.worker.sim.published import main

    main()
