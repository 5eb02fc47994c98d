"""The app: middleware for bodies, keys and browsers, one error shape, the endpoints, and what bridges mount on it.

Mirrors SGLang's `http_server.app` and its lifespan. A factory instead of a module-level app, so that
several engines can serve from one process.
Imports: nothing of sgviz but this folder.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from sgviz.serving.auth import AccessRules, AuthLevel, AuthMiddleware
from sgviz.serving.body_limits import MIB, BodyLimits
from sgviz.serving.context import ServingContext
from sgviz.serving.control_routes import declare_levels
from sgviz.serving.control_routes import router as control_router
from sgviz.serving.http_errors import install_error_handlers
from sgviz.serving.ops_routes import router as ops_router
from sgviz.serving.routes import router
from sgviz.serving.serving_chat import OpenAIServingChat
from sgviz.serving.serving_completions import OpenAIServingCompletion
from sgviz.serving.serving_generate import ServingGenerate
from sgviz.serving.session_routes import router as session_router
from sgviz.serving.vector_routes import router as vector_router
from sgviz.serving.vector_routes import serve_vectors


def create_app(context: ServingContext) -> FastAPI:
    """The HTTP face of one engine.

    `app.state.access` (AccessRules) is where a bridge declares the level of its paths; without that they
    need the API key. `context.mounts` run last, before the app starts.
    """
    # the bodies are msgspec structs, which FastAPI cannot describe, so there is no OpenAPI page
    app = FastAPI(title="sgviz", openapi_url=None, redirect_slashes=False, lifespan=_lifespan)
    app.state.context = context
    app.state.created = int(time.time())
    app.state.ending = False  # its server stops
    app.state.access = rules = AccessRules()
    for path in ("/flush_cache", "/abort_request", "/configure_logging"):
        rules.declare(path, AuthLevel.ADMIN_OPTIONAL)
    declare_levels(rules)
    http = context.http  # what is added later lies further out
    app.add_middleware(BodyLimits, max_bytes=int(http.max_body_mb * MIB), read_timeout=http.read_timeout)
    app.add_middleware(AuthMiddleware, keys=context.keys, rules=rules)
    if http.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=http.origins, allow_methods=["*"], allow_headers=["*"]
        )
    install_error_handlers(app)
    app.include_router(router)
    app.include_router(control_router)
    app.include_router(vector_router)
    app.include_router(session_router)
    app.include_router(ops_router)
    for mount in context.mounts:
        mount(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServingContext = app.state.context
    app.state.openai_serving_chat = OpenAIServingChat(context)
    app.state.openai_serving_completion = OpenAIServingCompletion(context)
    app.state.serving_generate = ServingGenerate(context)
    serve_vectors(app, context)
    try:
        yield
    finally:
        app.state.openai_serving_chat.close()
