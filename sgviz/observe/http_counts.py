"""Counting HTTP requests and answers of one port, of every kind, where they come in and go out.

The one group of metrics that is not folded from events: a request for `/v1/models` decides nothing and emits none.
Mirrors SGLang's response tracking middleware. Simplified: no routing keys.

Imports: prometheus_client, observe.names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgviz.observe.names import HTTP_COUNTERS, HTTP_GAUGES

UNMATCHED = "unmatched"  # one name for all paths that nobody serves: a scanner must not make a series a path
CLIENT_GONE = "499"


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


class CountingMiddleware:
    """Plain ASGI, so that streams and hang-ups pass untouched."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        where = {"endpoint": endpoint_of(scope), "method": scope["method"]}
        status = CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        counts = self._counts
        counts.requests.labels(**where).inc()
        counts.active.labels(**where).inc()
        try:
            await self._app(scope, receive, noting)
        finally:
            counts.active.labels(**where).dec()
            counts.responses.labels(**where, status_code=status).inc()


def endpoint_of(scope: Scope) -> str:
    """The route's own path, with its parameters' names; `unmatched` if nobody serves the path."""
    path = scope["path"]
    found = (route.path for route in _routes(scope["app"].router.routes) if route.path_regex.match(path))
    return next(found, UNMATCHED)


def _routes(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """The routes themselves; those of an included router may stand under it."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from _routes(getattr(getattr(route, "original_router", None), "routes", ()))
