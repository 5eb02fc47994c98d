"""The one door of all exports: a format by its name, a path or an address, and what was written.

Imports: errors, recording.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sgviz.errors import BadRequest, suggest

if TYPE_CHECKING:
    from sgviz.recording.recording import Recording

# name -> (module, what it writes)
FORMATS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "perfetto": ("sgviz.recording.export.perfetto", "one protobuf trace for ui.perfetto.dev"),
        "otel": (
            "sgviz.recording.export.otel",
            "OTLP spans: a JSON file, or an http(s) address of a collector",
        ),
        "parquet": ("sgviz.recording.export.tables", "a folder with one file a table (needs pyarrow)"),
        "csv": ("sgviz.recording.export.tables", "a folder with one file a table"),
    }
)


def export(rec: Recording, to: str, path: str | os.PathLike[str]) -> list[str]:
    """Write `rec` in the format `to`; returns the files (or the address) written.

    Raises:
        BadRequest: no such format. SgvizError: the path cannot be written, the address does not take it, or a
            package is missing.
    """
    if to not in FORMATS:
        raise BadRequest(f"no export format {to!r}{suggest(to, FORMATS)}; there are {', '.join(FORMATS)}")
    module = importlib.import_module(FORMATS[to][0])
    written: list[str] = module.write(rec.freeze(), path if "://" in str(path) else Path(path), to)
    return written
