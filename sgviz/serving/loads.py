"""The load of an engine in SGLang's shapes: /get_load of its older releases, /v1/loads of the newer, as JSON or for
Prometheus. What there is no feature for (speculation, LoRA, disaggregation) has no section.

Imports: errors, messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgviz.errors import BadRequest
from sgviz.messages.flow import Load

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
GB = 1 << 30


def old_shape(loads: Mapping[int, Load]) -> list[dict[str, Any]]:
    """One entry a rank, as /get_load gives it; `loads` by rank."""
    return [
        {
            "rid": None,
            "dp_rank": rank,
            "num_reqs": load.num_running_reqs + load.num_waiting_reqs,
            "num_waiting_reqs": load.num_waiting_reqs,
            "num_tokens": load.num_total_tokens,
        }
        for rank, load in loads.items()
    ]


def sections_of(include: str | None) -> frozenset[str]:
    """The sections of a list like "core,queues"; None: all. Raises BadRequest for an unknown one."""
    names = [part.strip() for part in include.split(",")] if include else ["all"]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise BadRequest(
            f"include: unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}", param="include"
        )
    return frozenset(SECTIONS) if "all" in names else frozenset(names)


def new_shape(rank: int, load: Load, timestamp: float, sections: frozenset[str]) -> dict[str, Any]:
    """One rank as /v1/loads gives it; the core is always there."""
    out: dict[str, Any] = {
        "dp_rank": rank,
        "timestamp": timestamp,
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_used_tokens": load.num_used_tokens,
        "num_total_tokens": load.num_total_tokens,
        "max_total_num_tokens": load.max_total_num_tokens,
        "token_usage": load.token_usage,
        "gen_throughput": load.gen_throughput,
        "cache_hit_rate": load.cache_hit_rate,
        "utilization": load.utilization,
        "max_running_requests": load.max_running_requests,
    }
    if "memory" in sections:
        out["memory"] = {
            "weight_gb": load.weight_bytes / GB,
            "kv_cache_gb": load.kv_bytes / GB,
            "graph_gb": 0.0,
            "token_capacity": load.max_total_num_tokens,
        }
    if "queues" in sections:
        out["queues"] = {
            "waiting": load.num_waiting_reqs - load.grammar,
            "grammar": load.grammar,
            "paused": load.paused,
            "retracted": load.retracted,
        }
    return out


def prometheus_text(loads: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of all ranks as gauges, those of a section under its name."""
    samples: dict[str, list[str]] = {}
    for load in loads:
        for name, number in _flat(load).items():
            metric = f"sglang_{name}"
            samples.setdefault(metric, []).append(f'{metric}{{dp_rank="{load["dp_rank"]}"}} {number}')
    lines = [line for name, values in samples.items() for line in (f"# TYPE {name} gauge", *values)]
    return "\n".join(lines) + "\n"


def _flat(load: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in load.items():
        if isinstance(value, dict):
            flat.update({f"{name}_{part}": number for part, number in value.items()})
        elif name != "dp_rank":
            flat[name] = value
    return flat
