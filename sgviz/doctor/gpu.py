"""torch, and the GPUs that it and the driver see. Imports: doctor.check; torch in `probe_torch` only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from sgviz.doctor.check import Check, State, mebibytes
from sgviz.doctor.software import INSTALL, Version, version

TOPIC = "torch and GPU"
QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says of itself. `cuda`: the CUDA version it was built for. `gpus`: name and bytes of each."""

    version: str
    threads: int
    interop_threads: int
    cuda: str | None
    cuda_available: bool
    gpus: tuple[tuple[str, int], ...]


def probe_torch() -> TorchFacts | str:
    """The facts, or in a few words why torch cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways
        return f"{type(error).__name__}: {error}"
    available = torch.cuda.is_available()
    devices = (
        [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if available else []
    )
    return TorchFacts(
        version=torch.__version__,
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        cuda=torch.version.cuda,
        cuda_available=available,
        gpus=tuple((device.name, device.total_memory) for device in devices),
    )


def probe_driver() -> list[str]:
    """A line a GPU from the driver's own tool; empty where there is no such tool or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def checks(version_of: Version = version) -> Iterator[Check]:
    """torch, what it and the driver see, and the kernel packages."""
    facts, driver = probe_torch(), probe_driver()
    if isinstance(facts, str):
        yield Check(topic=TOPIC, name="torch", found=facts, state=State.BAD, advice=INSTALL)
    else:
        yield _build(facts)
        yield _threads(facts)
    gpus = () if isinstance(facts, str) else facts.gpus
    yield _gpus(gpus, driver)
    for package in ("triton", "flashinfer-python"):
        found = version_of(package)
        state = State.NONE if found is None else State.OK
        yield Check(topic=TOPIC, name=package, found=found or "not installed (optional)", state=state)


def _build(facts: TorchFacts) -> Check:
    built = f"built for CUDA {facts.cuda}" if facts.cuda else "CPU build"
    return Check(topic=TOPIC, name="torch", found=f"{facts.version}, {built}")


def _threads(facts: TorchFacts) -> Check:
    found = f"{facts.threads} in an operator, {facts.interop_threads} between operators"
    return Check(topic=TOPIC, name="torch threads", found=found)


def _gpus(seen: tuple[tuple[str, int], ...], driver: list[str]) -> Check:
    if seen:
        return Check(
            topic=TOPIC, name="GPU", found="; ".join(f"{name}, {mebibytes(size)}" for name, size in seen)
        )
    if driver:
        advice = "Install a torch build for CUDA; until then the model runs on the CPU."
        found = f"{'; '.join(driver)} (the driver sees it, torch does not)"
        return Check(topic=TOPIC, name="GPU", found=found, state=State.WARN, advice=advice)
    return Check(topic=TOPIC, name="GPU", found="none; the model runs on the CPU")
