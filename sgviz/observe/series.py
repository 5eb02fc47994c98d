"""The series behind the names: one registry of Prometheus objects, each with the labels of its side.

Mirrors the two collectors of SGLang (scheduler and tokenizer). Imports: observe.names, prometheus_client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sgviz.observe.names import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SCHEDULER,
    TM_COUNTERS,
    TM_HISTOGRAMS,
    TOKENIZER,
    Named,
)

Labels = Mapping[str, str]
NONE: Labels = {}


class Series:
    """All metrics that are folded from events.

    Args:
        model_name: label of every series. custom: labels that requests may bring; on the tokenizer's side,
            empty where a request brought none.
    """

    def __init__(self, model_name: str, custom: Sequence[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._scheduler = {"model_name": model_name, **SCHEDULER}
        self._tokenizer = {"model_name": model_name, **TOKENIZER, **dict.fromkeys(custom, "")}
        self._gauges = {name: self._gauge(name, what) for name, what in GAUGES.items()}
        self._counters = {name: self._counter(name, what, self._scheduler) for name, what in COUNTERS.items()}
        self._counters |= {
            name: self._counter(name, what, self._tokenizer) for name, what in TM_COUNTERS.items()
        }
        self._histograms = {
            name: self._histogram(name, what, self._scheduler) for name, what in HISTOGRAMS.items()
        }
        self._histograms |= {
            name: self._histogram(name, what, self._tokenizer) for name, what in TM_HISTOGRAMS.items()
        }

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def set(self, name: str, value: float) -> None:
        self._gauges[name].labels(**self._scheduler).set(value)

    def count(self, name: str, amount: float, custom: Labels = NONE, **more: str) -> None:
        counter, labels = self._counters[name]
        counter.labels(**{**labels, **custom}, **more).inc(amount)

    def observe(self, name: str, value: float, custom: Labels = NONE, /, **more: str) -> None:
        """`value` in seconds or tokens; two processes may stamp within one tick, so less than 0 is 0."""
        histogram, labels = self._histograms[name]
        histogram.labels(**{**labels, **custom}, **more).observe(max(0.0, value))

    # ------------------------------------------------------------ making

    def _gauge(self, name: str, what: Named) -> Gauge:
        return Gauge(f"sglang:{name}", what.words, list(self._scheduler), registry=self.registry)

    def _counter(self, name: str, what: Named, labels: dict[str, str]) -> tuple[Counter, Labels]:
        names = [*labels, *what.labels]
        made = Counter(f"sglang:{name}", what.words, names, registry=self.registry)
        if not what.labels:
            made.labels(**labels)  # shown as 0 from the start
        return made, labels

    def _histogram(self, name: str, what: Named, labels: dict[str, str]) -> tuple[Histogram, Labels]:
        names = [*labels, *what.labels]
        made = Histogram(f"sglang:{name}", what.words, names, buckets=what.buckets, registry=self.registry)
        return made, labels
