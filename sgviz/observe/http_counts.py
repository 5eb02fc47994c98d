"""The counters of HTTP requests and answers, of all ports of one engine.

The one group of metrics that is not folded from events: a request for `/v1/models` decides nothing and emits none.
What is counted, and where, is `serving.counting`; tokenizer workers send theirs.

Imports: prometheus_client, observe.names.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from sgviz.observe.names import HTTP_COUNTERS, HTTP_GAUGES


class HttpCounts:
    """The counters, in the registry of the others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        asked, answered, active = (
            HTTP_COUNTERS["http_requests"],
            HTTP_COUNTERS["http_responses"],
            HTTP_GAUGES["http_requests_active"],
        )
        self.requests = Counter("sglang:http_requests", asked.words, asked.labels, registry=registry)
        self.responses = Counter("sglang:http_responses", answered.words, answered.labels, registry=registry)
        self.active = Gauge("sglang:http_requests_active", active.words, active.labels, registry=registry)

    def came(self, endpoint: str, method: str) -> None:
        self.requests.labels(endpoint=endpoint, method=method).inc()
        self.active.labels(endpoint=endpoint, method=method).inc()

    def left(self, endpoint: str, method: str, status: str) -> None:
        self.active.labels(endpoint=endpoint, method=method).dec()
        self.responses.labels(endpoint=endpoint, method=method, status_code=status).inc()
