"""The router's metrics: its servers, what they were given, and how its answers ended.

What happens inside a server is told by that server's own /metrics. SGLang's mini_lb has none. Imports: this folder,
prometheus_client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgviz.router.blame import Side
from sgviz.router.servers import Server

SERVER = ("side", "url")


@dataclass(slots=True)
class Counts:
    """What a router has counted since it started.

    Attributes:
        answers: of pairs, by path and status. retries: pairs tried after a first. failed: attempts, by who is to blame.
    """

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    retries: int = 0
    failed: Counter[Side] = field(default_factory=Counter)


def exposition(servers: Sequence[Server], counts: Counts) -> bytes:
    """All of it in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Now(servers, counts))
    return generate_latest(registry)


class _Now(Collector):
    def __init__(self, servers: Sequence[Server], counts: Counts) -> None:
        self._servers, self._counts = servers, counts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_servers()
        answers = CounterMetricFamily(
            "sgviz_router_answers",
            "Answers of pairs by the status they began with; 499: the client left.",
            labels=("path", "status"),
        )
        for (path, status), count in sorted(self._counts.answers.items()):
            answers.add_metric((path, str(status)), count)
        yield answers
        yield CounterMetricFamily(
            "sgviz_router_retries",
            "Times that a request went on to another pair before its first token.",
            value=self._counts.retries,
        )
        failed = CounterMetricFamily(
            "sgviz_router_failed_attempts",
            "Attempts, one pair each, that gave no answer or broke off, by who is to blame; unknown: nobody can tell.",
            labels=("side",),
        )
        for side in Side:
            failed.add_metric((side,), self._counts.failed[side])
        yield failed

    def _of_servers(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "sgviz_router_server_healthy", "1 while the server is given requests.", labels=SERVER
        )
        running = GaugeMetricFamily(
            "sgviz_router_server_requests", "Requests that the router has there now.", labels=SERVER
        )
        given = CounterMetricFamily(
            "sgviz_router_server_given", "Requests that the server was given.", labels=SERVER
        )
        failed = CounterMetricFamily(
            "sgviz_router_server_failed", "Requests to which its connection broke.", labels=SERVER
        )
        for server in self._servers:
            labels = (server.side, server.url)
            healthy.add_metric(labels, float(server.healthy))
            running.add_metric(labels, server.requests)
            given.add_metric(labels, server.given)
            failed.add_metric(labels, server.failed)
        yield from (healthy, running, given, failed)
