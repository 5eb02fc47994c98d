"""What /metrics says, as values."""

from __future__ import annotations

import urllib.request

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(url: str) -> dict[str, Metric]:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        found = text_string_to_metric_families(answer.read().decode())
        return {family.name.removeprefix("sglang:"): family for family in found}


def sums(url: str) -> dict[tuple[str, str], float]:
    """Sum over all series of a sample name and `mode`."""
    out: dict[tuple[str, str], float] = {}
    for family in families(url).values():
        for sample in family.samples:
            key = (sample.name.removeprefix("sglang:"), sample.labels.get("mode", ""))
            out[key] = out.get(key, 0.0) + sample.value
    return out
