"""The app: middleware for keys, one error shape, the endpoints, and what bridges mount on it.

Mirrors SGLang's `http_server.app` and its lifespan. A factory instead of a module-level app, so that
several engines can serve from one process.
Imports: nothing of sgviz but this folder.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from sgviz.serving.auth import AccessRules, AuthLevel, AuthMiddleware
from sgviz.serving.context import ServingContext
from sgviz.serving.http_errors import install_error_handlers
from sgviz.serving.routes import router
from sgviz.serving.serving_chat import OpenAIServingChat
from sgviz.serving.serving_completions import OpenAIServingCompletion
from sgviz.serving.serving_generate import ServingGenerate


def create_app(context: ServingContext) -> FastAPI:
    """The HTTP face of one engine.

    `app.state.access` (AccessRules) is where a bridge declares the level of its paths; without that they
    need the API key. `context.mounts` run last, before the app starts.
    """
    # the bodies are msgspec structs, which FastAPI cannot describe, so there is no OpenAPI page
    app = FastAPI(title="sgviz", openapi_url=None, redirect_slashes=False, lifespan=_lifespan)
    app.state.context = context
    app.state.created = int(time.time())
    app.state.access = rules = AccessRules()
    for path in ("/flush_cache", "/abort_request"):
        rules.declare(path, AuthLevel.ADMIN_OPTIONAL)
    app.add_middleware(AuthMiddleware, keys=context.keys, rules=rules)
    install_error_handlers(app)
    app.include_router(router)
    for mount in context.mounts:
        mount(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServingContext = app.state.context
    app.state.openai_serving_chat = OpenAIServingChat(context)
    app.state.openai_serving_completion = OpenAIServingCompletion(context)
    app.state.serving_generate = ServingGenerate(context)
    try:
        yield
    finally:
        app.state.openai_serving_chat.close()
