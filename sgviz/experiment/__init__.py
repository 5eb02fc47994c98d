"""Experiments: the same workload under different settings, measured from events, compared by request.

Mirrors what SGLang's bench_serving and offline_throughput are used for. Public names load on first use, so that
`sgviz bench`, a client, gets its numbers without an engine. Imports: engine, virtual, recording, workload, viz.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgviz.experiment.comparison import Comparison, Run
    from sgviz.experiment.interleave import compare
    from sgviz.experiment.live_load import LiveLoad
    from sgviz.experiment.load_generator import Answer, drive
    from sgviz.experiment.measures import measure, requests_of
    from sgviz.experiment.pair import Pair
    from sgviz.experiment.pair_trade import Trade

_LAZY = {
    "Answer": "load_generator",
    "Comparison": "comparison",
    "LiveLoad": "live_load",
    "Pair": "pair",
    "Run": "comparison",
    "Trade": "pair_trade",
    "compare": "interleave",
    "drive": "load_generator",
    "measure": "measures",
    "requests_of": "measures",
}

__all__ = [
    "Answer",
    "Comparison",
    "LiveLoad",
    "Pair",
    "Run",
    "Trade",
    "compare",
    "drive",
    "measure",
    "requests_of",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sgviz.experiment' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sgviz.experiment.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
