"""The endpoints that generate nothing: vectors, scores, rankings. Mirrors SGLang's http_server routes.

Imports: nothing of sgviz but this folder.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from sgviz.serving.context import ServingContext
from sgviz.serving.routes import Body
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


@router.post("/v1/embeddings")
async def embeddings(body: Body, request: Request) -> Response:
    response: Response = await request.app.state.openai_serving_embedding.handle_request(body, request)
    return response


@router.api_route("/encode", methods=["POST", "PUT"])
async def encode(body: Body, request: Request) -> Response:
    response: Response = await request.app.state.serving_encode.handle_request(body, request)
    return response


@router.post("/v1/score")
async def score(body: Body, request: Request) -> Response:
    response: Response = await request.app.state.openai_serving_score.handle_request(body, request)
    return response


@router.api_route("/v1/rerank", methods=["POST", "PUT"])
async def rerank(body: Body, request: Request) -> Response:
    response: Response = await request.app.state.openai_serving_rerank.handle_request(body, request)
    return response
