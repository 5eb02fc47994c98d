"""Processor and memory, from the kernel's own tables; what a container takes away is taken away here too.

Imports: doctor.check.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from sgviz.doctor.check import Check, State, mebibytes

TOPIC = "machine"
MODEL_NEEDS = 2 * 2**30  # the default model in float32 with 1 GiB of KV memory, all processes together
_VECTOR = re.compile(r"(avx|amx|vnni|asimd|sve)")


def checks(root: Path = Path("/")) -> Iterator[Check]:
    """CPU, cores, vector units, memory. `root`: where `proc` and `sys` hang."""
    info = _read(root / "proc/cpuinfo")
    yield Check(
        topic=TOPIC, name="system", found=f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    yield Check(topic=TOPIC, name="CPU", found=_cpu(info))
    yield _cores(_quota(root))
    yield _vector_units(info)
    yield _memory(_bytes_total(root), _bytes_free(root))


def _read(path: Path) -> str:
    """The file's text; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, *names: str) -> str | None:
    """The value of the first `name : value` line."""
    for name in names:
        if match := re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.MULTILINE):
            return match.group(1).strip()
    return None


def _cpu(info: str) -> str:
    return _field(info, "model name", "Model", "Hardware") or platform.processor() or "unknown"


def _quota(root: Path) -> float | None:
    """Cores' worth of time that the control group allows, None for no limit."""
    words = _read(root / "sys/fs/cgroup/cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _cores(quota: float | None) -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{usable} usable of {os.cpu_count()}"
    if quota is not None:
        found += f", limited to {quota:g} cores of time"
    if min(usable, quota or usable) < 2:
        advice = "Scheduler, worker and server share a core, so the overlap loop cannot overlap here."
        return Check(topic=TOPIC, name="cores", found=found, state=State.WARN, advice=advice)
    return Check(topic=TOPIC, name="cores", found=found)


def _vector_units(info: str) -> Check:
    flags = _field(info, "flags", "Features")
    if flags is None:
        return Check(topic=TOPIC, name="vector units", found="unknown")
    vector = sorted(flag for flag in set(flags.split()) if _VECTOR.search(flag))
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in vector:
        found = " ".join(vector) or "none"
        advice = "Without AVX2 a forward is several times slower; take the mock device or a smaller model."
        return Check(topic=TOPIC, name="vector units", found=found, state=State.WARN, advice=advice)
    return Check(topic=TOPIC, name="vector units", found=" ".join(vector) or "none")


def _bytes_total(root: Path) -> int | None:
    """The smaller of the machine's memory and the control group's limit."""
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    sizes = [_meminfo(root, "MemTotal"), int(limit) if limit.isdigit() else None]
    return min((size for size in sizes if size is not None), default=None)


def _bytes_free(root: Path) -> int | None:
    """What can be had without swapping, in the machine and in the control group."""
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    used = _read(root / "sys/fs/cgroup/memory.current").strip()
    group = int(limit) - int(used) if limit.isdigit() and used.isdigit() else None
    sizes = [_meminfo(root, "MemAvailable"), group]
    return min((size for size in sizes if size is not None), default=None)


def _meminfo(root: Path, name: str) -> int | None:
    value = _field(_read(root / "proc/meminfo"), name)
    return int(value.split()[0]) * 1024 if value else None


def _memory(total: int | None, free: int | None) -> Check:
    if total is None or free is None:
        return Check(topic=TOPIC, name="memory", found="unknown")
    found = f"{mebibytes(free)} free of {mebibytes(total)}"
    if free >= MODEL_NEEDS:
        return Check(topic=TOPIC, name="memory", found=found)
    advice = f"The default model wants about {mebibytes(MODEL_NEEDS)}; lower --max-total-tokens."
    return Check(topic=TOPIC, name="memory", found=found, state=State.WARN, advice=advice)
