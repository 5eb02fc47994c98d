"""The GPUs that can be simulated: data-sheet numbers, and which share of them a good engine reaches.

SGLang has no such table; it runs on the device itself. Data-sheet numbers are NVIDIA's (dense, without
sparsity). The achieved shares are taken from published measurements where there are some, and say so.
Imports: errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.errors import ConfigError, suggest

GB = 10**9
TERA = 10**12
MICRO = 1e-6
DEVICE_PREFIX = "sim:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        memory_bytes, bandwidth, bf16_flops, fp8_flops: of the data sheet; bytes, bytes/s, operations/s (fp8 0:
            the GPU has none).
        link_bandwidth: bytes/s to the other GPUs of its machine, one direction.
        bandwidth_share, flops_share, fp8_share: what whole forwards reach of bandwidth and rates.
        layer_overhead_s: what a decoder layer costs beyond its roofline (launches, norms, small kernels).
        allreduce_latency_s: of one small all-reduce among a few GPUs.
        source: where the shares come from.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    link_bandwidth: float
    bandwidth_share: float
    flops_share: float
    fp8_share: float
    layer_overhead_s: float
    allreduce_latency_s: float
    source: str


# A100: the gpt-fast and torchao rows of `published.py` determine bandwidth share, layer overhead and all-reduce
# latency (two model sizes on one GPU give the first two, 2 to 8 GPUs the third); first-token latencies of
# TensorRT-LLM determine the rate. H100: TensorRT-LLM's FP8 rows; its kernels are shorter, so is the overhead.
GPUS: tuple[Gpu, ...] = (
    Gpu(
        name="a100-80g",
        memory_bytes=80 * GB,
        bandwidth=2039 * GB,
        bf16_flops=312 * TERA,
        fp8_flops=0.0,
        link_bandwidth=300 * GB,
        bandwidth_share=0.77,
        flops_share=0.68,
        fp8_share=0.0,
        layer_overhead_s=29 * MICRO,
        allreduce_latency_s=14 * MICRO,
        source="NVIDIA A100 80GB SXM data sheet; shares from gpt-fast, torchao and TensorRT-LLM",
    ),
    Gpu(
        name="h100-sxm",
        memory_bytes=80 * GB,
        bandwidth=3350 * GB,
        bf16_flops=989 * TERA,
        fp8_flops=1979 * TERA,
        link_bandwidth=450 * GB,
        bandwidth_share=0.77,
        flops_share=0.62,
        fp8_share=0.41,
        layer_overhead_s=20 * MICRO,
        allreduce_latency_s=10 * MICRO,
        source="NVIDIA H100 SXM data sheet; bandwidth share as A100, FP8 share from TensorRT-LLM, bf16 share ours",
    ),
    Gpu(
        name="h200",
        memory_bytes=141 * GB,
        bandwidth=4800 * GB,
        bf16_flops=989 * TERA,
        fp8_flops=1979 * TERA,
        link_bandwidth=450 * GB,
        bandwidth_share=0.77,
        flops_share=0.62,
        fp8_share=0.41,
        layer_overhead_s=20 * MICRO,
        allreduce_latency_s=10 * MICRO,
        source="NVIDIA H200 SXM data sheet; shares as H100, not measured",
    ),
    Gpu(
        name="l4",
        memory_bytes=24 * GB,
        bandwidth=300 * GB,
        bf16_flops=121 * TERA,
        fp8_flops=242 * TERA,
        link_bandwidth=32 * GB,
        bandwidth_share=0.80,
        flops_share=0.55,
        fp8_share=0.45,
        layer_overhead_s=30 * MICRO,
        allreduce_latency_s=30 * MICRO,
        source="NVIDIA L4 data sheet (PCIe 4.0 x16); shares ours, not measured",
    ),
)


def find_gpu(device: str) -> Gpu:
    """The GPU behind a device name such as `sim:h100-sxm` (or `h100-sxm`). ConfigError for any other."""
    name = device.removeprefix(DEVICE_PREFIX)
    for gpu in GPUS:
        if gpu.name == name:
            return gpu
    known = [gpu.name for gpu in GPUS]
    raise ConfigError(
        f"there is no simulated GPU {name!r}{suggest(name, known)}; there are {', '.join(known)}",
        param="device",
    )
