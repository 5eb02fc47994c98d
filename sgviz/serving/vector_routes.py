"""The endpoints that generate nothing: vectors, scores, rankings. Mirrors SGLang's http_server routes.

Imports: nothing of sgviz but this folder.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from sgviz.serving.context import ServingContext
from sgviz.serving.routes import add_serving
from sgviz.serving.serving_embedding import OpenAIServingEmbedding, ServingEncode
from sgviz.serving.serving_rerank import OpenAIServingRerank
from sgviz.serving.serving_score import OpenAIServingScore

router = APIRouter()


def serve_vectors(app: FastAPI, context: ServingContext) -> None:
    """Put the objects that answer on `app.state`."""
    app.state.openai_serving_embedding = OpenAIServingEmbedding(context)
    app.state.serving_encode = ServingEncode(context)
    app.state.openai_serving_score = OpenAIServingScore(context)
    app.state.openai_serving_rerank = OpenAIServingRerank(context)


add_serving(router, "/v1/embeddings", "openai_serving_embedding")
add_serving(router, "/encode", "serving_encode", "POST", "PUT")
add_serving(router, "/v1/score", "openai_serving_score")
add_serving(router, "/v1/rerank", "openai_serving_rerank", "POST", "PUT")
