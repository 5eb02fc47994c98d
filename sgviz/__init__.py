"""sgviz: an LLM serving pipeline in the shape of SGLang whose every decision is an event.

Public names load on first use, so `import sgviz` is cheap and a recording opens without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgviz.debugger import connect
    from sgviz.engine import Engine
    from sgviz.recording import PairedRecording, Recording, load, load_pair

__version__ = "0.1.0"

_LAZY = {
    "Engine": ("sgviz.engine", "Engine"),
    "Recording": ("sgviz.recording", "Recording"),
    "experiment": ("sgviz.experiment", None),
    "connect": ("sgviz.debugger", "connect"),
    "load": ("sgviz.recording", "load"),
    "load_pair": ("sgviz.recording", "load_pair"),
    "PairedRecording": ("sgviz.recording", "PairedRecording"),
    "viz": ("sgviz.viz", None),
    "workload": ("sgviz.workload", None),
}

__all__ = [
    "Engine", "PairedRecording", "Recording", "__version__", "connect", "experiment", "load", "load_pair", "viz",
    "workload",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sgviz' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
