"""The router's app: limits of bodies, one error shape, and who answers each path.

Imports: serving (limits, errors), this folder.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from sgviz.router.paths import PATHS, Who, refusal
from sgviz.router.router import Router
from sgviz.serving.body_limits import MIB, BodyLimits
from sgviz.serving.http_errors import install_error_handlers

READ_TIMEOUT_S = 60.0
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]


def create_router_app(router: Router) -> FastAPI:
    """The HTTP face of `router`, which is started and closed by the caller."""
    app = FastAPI(title="sgviz router", openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        BodyLimits, max_bytes=int(router.options.max_body_mb * MIB), read_timeout=READ_TIMEOUT_S
    )
    install_error_handlers(app)

    async def own(request: Request) -> Response:
        path = request.url.path
        if path == "/health_generate":
            return await router.probe(request)
        if path == "/metrics":
            return router.metrics()
        return await router.server_info(request) if path.endswith("server_info") else router.health()

    async def rest(request: Request) -> Response:
        raise refusal(request.method, request.url.path)

    endpoints = {
        Who.PAIR: router.generate, Who.ROUTER: own, Who.ONE: router.ask_one, Who.ALL: router.ask_all,
    }  # fmt: skip
    for path, (who, methods) in PATHS.items():
        app.add_route(path, endpoints[who], methods=list(methods))
    app.add_route("/{path:path}", rest, methods=METHODS)
    return app
