"""Published step times and throughputs, and what the cost model says in the same place.

Every row is somebody's measurement with its source. The single-request rows of the A100, and the first tokens after
2,048, are what its shares were set by; all others are checks. A row that does not fit stays: short prompts lie on
the ridge of the roofline, and the early tensor-parallel kernels behind the last row were half as fast as the
model's. `rows()` computes, `main()` prints. Imports: worker.sim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sgviz.worker.sim.cost_model import RooflineCost
from sgviz.worker.sim.hardware import find_gpu
from sgviz.worker.sim.models import SimModel, find_model
from sgviz.worker.sim.step_work import StepWork

GPT_FAST = "gpt-fast README, Benchmarks and Tensor Parallelism (8x A100-80GB at 330 W)"
TORCHAO = "torchao quantization README, Benchmarks (A100, bfloat16)"
TRTLLM = "TensorRT-LLM docs/source/performance.md, v0.5 (static batches)"
FIT_STEPS = 64  # decode steps of a long run are summed at so many places


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A measurement: `batch` requests of `prompt` tokens, each given `output` tokens.

    Attributes:
        unit: `tok/s` of output, or `ms` to the first token (then output is 1).
        fp8: weights and KV in FP8.
    """

    gpu: str
    model: str
    tp: int
    batch: int
    prompt: int
    output: int
    value: float
    unit: str
    source: str
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement, the model's number, and its error (+ is too large a number)."""

    published: Published
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.published.value - 1


def _decode_alone(model: str, tp: int, value: float, source: str = GPT_FAST) -> Published:
    """One request with a prompt of a few tokens and 200 new ones."""
    return Published(
        gpu="a100-80g", model=model, tp=tp, batch=1, prompt=5, output=200, value=value, unit="tok/s",
        source=source,
    )  # fmt: skip


def _first_token(gpu: str, model: str, tp: int, prompt: int, value: float, fp8: bool = False) -> Published:
    return Published(
        gpu=gpu, model=model, tp=tp, batch=1, prompt=prompt, output=1, value=value, unit="ms", source=TRTLLM,
        fp8=fp8,
    )  # fmt: skip


def _static(model: str, tp: int, batch: int, prompt: int, output: int, value: float) -> Published:
    return Published(
        gpu="h100-sxm", model=model, tp=tp, batch=batch, prompt=prompt, output=output, value=value, unit="tok/s",
        source=TRTLLM, fp8=True,
    )  # fmt: skip


PUBLISHED: tuple[Published, ...] = (
    _decode_alone("llama-2-7b", 1, 104.9),
    _decode_alone("llama-2-7b", 2, 168.84),
    _decode_alone("llama-2-7b", 4, 254.02),
    _decode_alone("llama-2-7b", 8, 328.43),
    _decode_alone("llama-2-70b", 4, 38.01),
    _decode_alone("llama-2-70b", 8, 62.50),
    _decode_alone("llama-2-7b", 1, 107.38, TORCHAO),
    _decode_alone("llama-3-8b", 1, 95.64, TORCHAO),
    _first_token("a100-80g", "llama-2-7b", 1, 128, 16),
    _first_token("a100-80g", "llama-2-7b", 1, 2048, 133),
    _first_token("a100-80g", "llama-2-70b", 4, 128, 47),
    _first_token("a100-80g", "llama-2-70b", 4, 2048, 377),
    _first_token("h100-sxm", "llama-2-7b", 1, 128, 7, fp8=True),
    _first_token("h100-sxm", "llama-2-7b", 1, 2048, 36, fp8=True),
    _first_token("h100-sxm", "llama-2-70b", 4, 2048, 109, fp8=True),
    _static("llama-2-7b", 1, 64, 128, 128, 9193),
    _static("llama-2-7b", 1, 64, 128, 2048, 5367),
    _static("llama-2-7b", 1, 64, 2048, 128, 2058),
    _static("llama-2-7b", 1, 32, 2048, 2048, 2230),
    _static("llama-2-70b", 4, 64, 128, 2048, 2616),
)


def rows() -> list[Row]:
    """Every measurement beside the model."""
    return [Row(item, _modelled(item)) for item in PUBLISHED]


def _modelled(item: Published) -> float:
    cost = RooflineCost(find_gpu(item.gpu), _shape(item), item.tp)
    prefill_s = cost.step(StepWork.of([(0, item.prompt)] * item.batch)).total
    if item.unit == "ms":
        return prefill_s * 1000
    return item.batch * item.output / (prefill_s + _decode_s(cost, item))


def _decode_s(cost: RooflineCost, item: Published) -> float:
    """Seconds of the steps after the first token, the length growing from step to step."""
    steps = item.output - 1
    places = min(FIT_STEPS, steps)
    middle = [item.prompt + (i + 0.5) * steps / places for i in range(places)]
    return sum(
        cost.step(StepWork.of([(int(length), 1)] * item.batch)).total * steps / places for length in middle
    )


def _shape(item: Published) -> SimModel:
    model = find_model(item.model)
    return dataclasses.replace(model, itemsize=1) if item.fp8 else model


def table() -> str:
    """The rows as text."""
    lines = [
        f"{'gpu':10}{'model':13}{'GPUs':>5}{'batch':>6}{'prompt':>8}{'output':>8}{'published':>12}{'model':>10}"
        f"{'error':>8}  source"
    ]
    for row in rows():
        item = row.published
        kind = f"{item.model}{' fp8' if item.fp8 else ''}"
        lines.append(
            f"{item.gpu:10}{kind[:16]:16}{item.tp:>2}{item.batch:>6}{item.prompt:>8}{item.output:>8}"
            f"{item.value:>7.6g} {item.unit:5}{row.modelled:>9.5g}{row.error:>+8.0%}  {item.source}"
        )
    return "\n".join(lines)


def main() -> None:
    print(table())
