"""The series behind the names: one registry of Prometheus objects, each with the labels of its side.

Mirrors the two collectors of SGLang (scheduler and tokenizer). Imports: observe.names, prometheus_client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sgviz.observe.names import (
    COUNTERS,
    DP_RANK,
    GAUGES,
    HISTOGRAMS,
    OF_ALL,
    SCHEDULER,
    SIDE_COUNTERS,
    SIDE_GAUGES,
    SIDE_HISTOGRAMS,
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
            empty where a request brought none. ranks: the schedulers where there are several; then what each has of
            its own has a label `dp_rank`, empty for what no rank did. side: prefill or decode, of a server of one side.
    """

    def __init__(
        self, model_name: str, custom: Sequence[str] = (), ranks: Sequence[int] = (), side: str = ""
    ) -> None:
        self.registry = CollectorRegistry()
        self._ranks = ranks
        of = {"engine_type": side} if side else {}
        self._scheduler = {"model_name": model_name, **SCHEDULER, **of, **({DP_RANK: ""} if ranks else {})}
        self._tokenizer = {"model_name": model_name, **TOKENIZER, **of, **dict.fromkeys(custom, "")}
        gauges = GAUGES | (SIDE_GAUGES if side else {})
        counters = COUNTERS | (SIDE_COUNTERS if side else {})
        histograms = HISTOGRAMS | (SIDE_HISTOGRAMS if side else {})
        self._gauges = {name: self._gauge(name, what) for name, what in gauges.items()}
        self._counters = {name: self._counter(name, what, self._scheduler) for name, what in counters.items()}
        self._counters |= {
            name: self._counter(name, what, self._tokenizer) for name, what in TM_COUNTERS.items()
        }
        self._histograms = {
            name: self._histogram(name, what, self._scheduler) for name, what in histograms.items()
        }
        self._histograms |= {
            name: self._histogram(name, what, self._tokenizer) for name, what in TM_HISTOGRAMS.items()
        }

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def set(self, name: str, value: float, own: Labels = NONE) -> None:
        """`own`: the label of a rank, where there are several."""
        self._gauges[name].labels(**{**self._scheduler, **own}).set(value)

    def count(self, name: str, amount: float, own: Labels = NONE, **more: str) -> None:
        """`own`: the label of a rank, or the custom labels of a request."""
        counter, labels = self._counters[name]
        counter.labels(**{**labels, **own}, **more).inc(amount)

    def observe(self, name: str, value: float, own: Labels = NONE, /, **more: str) -> None:
        """`value` in seconds or tokens; two processes may stamp within one tick, so less than 0 is 0."""
        histogram, labels = self._histograms[name]
        histogram.labels(**{**labels, **own}, **more).observe(max(0.0, value))

    # ------------------------------------------------------------ making

    def _gauge(self, name: str, what: Named) -> Gauge:
        return Gauge(f"sglang:{name}", what.words, list(self._scheduler), registry=self.registry)

    def _counter(self, name: str, what: Named, labels: dict[str, str]) -> tuple[Counter, Labels]:
        labels = {key: value for key, value in labels.items() if key != DP_RANK or name not in OF_ALL}
        names = [*labels, *what.labels]
        made = Counter(f"sglang:{name}", what.words, names, registry=self.registry)
        of = [{DP_RANK: str(rank)} for rank in self._ranks] if DP_RANK in labels else [{}]
        for own in of if not what.labels else ():
            made.labels(**{**labels, **own})  # shown as 0 from the start
        return made, labels

    def _histogram(self, name: str, what: Named, labels: dict[str, str]) -> tuple[Histogram, Labels]:
        names = [*labels, *what.labels]
        made = Histogram(f"sglang:{name}", what.words, names, buckets=what.buckets, registry=self.registry)
        return made, labels
