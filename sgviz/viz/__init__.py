"""Pictures of recordings: matplotlib figures, terminal tables, and the live widgets, which load on first use.

Imports: events, errors, recording, matplotlib, rich, anywidget. Never an engine module, never torch; `LoadPanel`
drives an engine, so it lives in `sgviz.experiment` and is only found here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgviz.experiment.load_panel import LoadPanel
    from sgviz.viz.widgets import Dashboard, Journey, KVMap, OverlapLanes, RadixTree, Stepper

_LAZY = {
    "Dashboard": "sgviz.viz.widgets",
    "Journey": "sgviz.viz.widgets",
    "KVMap": "sgviz.viz.widgets",
    "LoadPanel": "sgviz.experiment.load_panel",
    "OverlapLanes": "sgviz.viz.widgets",
    "RadixTree": "sgviz.viz.widgets",
    "Stepper": "sgviz.viz.widgets",
}

__all__ = ["Dashboard", "Journey", "KVMap", "LoadPanel", "OverlapLanes", "RadixTree", "Stepper"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sgviz.viz' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
