"""Pictures of recordings: matplotlib figures, terminal tables, and the live widgets, which load on first use.

Imports: events, errors, recording, matplotlib, rich, anywidget. Never an engine module, never torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgviz.viz.widgets import Dashboard, Journey, KVMap, RadixTree, Stepper

__all__ = ["Dashboard", "Journey", "KVMap", "RadixTree", "Stepper"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sgviz.viz' has no attribute {name!r}")
    return getattr(importlib.import_module("sgviz.viz.widgets"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
