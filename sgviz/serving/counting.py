"""Counting HTTP requests and answers of one port, of every kind, where they come in and go out.

Mirrors SGLang's response tracking middleware. Simplified: no routing keys. Imports: nothing of sgviz.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNMATCHED = "unmatched"  # one name for all paths that nobody serves: a scanner must not make a series a path
CLIENT_GONE = "499"


class Counts(Protocol):
    """Who counts, by the route's path and the method."""

    def came(self, endpoint: str, method: str) -> None: ...

    def left(self, endpoint: str, method: str, status: str) -> None: ...


class CountingMiddleware:
    """Plain ASGI, so that streams and hang-ups pass untouched."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint, method = endpoint_of(scope), scope["method"]
        status = CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        self._counts.came(endpoint, method)
        try:
            await self._app(scope, receive, noting)
        finally:
            self._counts.left(endpoint, method, status)


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
