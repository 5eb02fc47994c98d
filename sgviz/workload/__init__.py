"""Workloads: what arrives when, how long the prompts are and what they share. Seeded values, made before a run.

Mirrors the datasets and arrival options of SGLang's bench_serving. Imports: errors, msgspec.
"""

from sgviz.workload.arrivals import closed_loop, gamma, poisson
from sgviz.workload.endless import Endless, LoadShape
from sgviz.workload.heavy_tail import heavy_tail
from sgviz.workload.lengths import Choice, Length, LogNormal, Uniform
from sgviz.workload.sessions import multi_turn, shared_prefix
from sgviz.workload.traces import trace
from sgviz.workload.value import Request, Segment, Workload, load

__all__ = [
    "Choice", "Endless", "Length", "LoadShape", "LogNormal", "Request", "Segment", "Uniform", "Workload",
    "closed_loop", "gamma", "heavy_tail", "load", "multi_turn", "poisson", "shared_prefix", "trace",
]  # fmt: skip
