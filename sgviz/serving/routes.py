"""The endpoints. Each is a few lines: its body is checked, its object on `app.state` answers.

Mirrors SGLang's http_server routes as far as their features exist.
Imports: errors, messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from sgviz.errors import BadRequest, Unavailable
from sgviz.function_call import FunctionCallParser, detector_of
from sgviz.messages.generate import LONG_TEXT
from sgviz.reasoning import ReasoningParser, format_of
from sgviz.serving.context import ServingContext
from sgviz.serving.http_errors import json_response, validate_json_request
from sgviz.serving.protocol import (
    AbortRequest,
    DetokenizeRequest,
    ParseFunctionCallRequest,
    SeparateReasoningRequest,
    TokenizeRequest,
    ids_of,
    is_ids,
    parse,
)
from sgviz.serving.routing import tell_ranks_out
from sgviz.serving.serving_base import check_model, refuse_unless_up
from sgviz.serving.tools import check_tools

T = TypeVar("T")
router = APIRouter()
Body = Annotated[dict[str, Any], Depends(validate_json_request)]
FLUSH_RETRY_S = 0.05


def context_of(request: Request) -> ServingContext:
    """The context that `create_app` was given."""
    context: ServingContext = request.app.state.context
    return context


Context = Annotated[ServingContext, Depends(context_of)]


# ---------------------------------------------------------------- generation


def add_serving(router: APIRouter, path: str, name: str, *methods: str) -> None:
    """Let `app.state`'s object of that name answer POST (or `methods`) of `path`."""

    async def endpoint(body: Body, request: Request) -> Response:
        response: Response = await getattr(request.app.state, name).handle_request(body, request)
        return response

    router.add_api_route(path, endpoint, methods=list(methods or ("POST",)), name=path)


add_serving(router, "/v1/chat/completions", "openai_serving_chat")
add_serving(router, "/v1/completions", "openai_serving_completion")
add_serving(router, "/generate", "serving_generate", "POST", "PUT")


# ---------------------------------------------------------------- health


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(context: Context) -> Response:
    """200 when up and, unless the context says otherwise, a small generation comes through."""
    refuse_unless_up(context.status)
    return await _probe(context) if context.health_generation else Response()


@router.api_route("/health_generate", methods=["GET", "HEAD"])
async def health_generate(context: Context) -> Response:
    refuse_unless_up(context.status)
    return await _probe(context)


@router.get("/ready")
@router.get("/ping")
async def ready(context: Context) -> Response:
    """200 when requests are taken, without asking the engine; a header names ranks that get none."""
    refuse_unless_up(context.status)
    ranks = context.tokenizer_manager.ranks
    return Response(headers=tell_ranks_out(ranks.out, ranks.size))


async def _probe(context: ServingContext) -> Response:
    silent = await context.tokenizer_manager.health_generate(context.health_timeout)
    if silent is not None:
        raise Unavailable(f"no sign of life from the {silent} within {context.health_timeout:g} s")
    return Response()


# ---------------------------------------------------------------- facts


@router.get("/v1/models")
async def models(context: Context, request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(context, request)]})


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, context: Context, request: Request) -> Response:
    check_model(model_id, context.facts)
    return json_response(_model_card(context, request))


def _model_card(context: ServingContext, request: Request) -> dict[str, Any]:
    facts = context.facts
    return {
        "id": facts.served_model_name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "sgviz",
        "root": facts.model_path,
        "parent": None,
        "max_model_len": facts.context_len,
    }


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(context: Context) -> Response:
    facts, weights = context.facts, context.tokenizer_manager.control.weights
    return json_response(
        {
            "model_path": weights.model_path or facts.model_path,
            "tokenizer_path": facts.tokenizer_path or facts.model_path,
            "served_model_name": facts.served_model_name,
            "is_generation": facts.is_generation,
            "preferred_sampling_params": facts.default_sampling or None,
            "weight_version": weights.version,
            "context_len": facts.context_len,
            "vocab_size": facts.vocab_size,
            "eos_token_ids": facts.eos_token_ids,
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(context: Context) -> Response:
    """Settings, version, and the scheduler's own account of itself."""
    reply = await context.tokenizer_manager.get_internal_state(context.health_timeout)
    return json_response(
        {
            **context.settings,
            "served_model_name": context.facts.served_model_name,
            "version": context.facts.version,
            "status": context.status.state,
            "internal_states": reply.state.get("ranks", [reply.state]),
        }
    )


# ---------------------------------------------------------------- control


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(context: Context, timeout: float = 0.0) -> Response:
    """Drop the prefix cache; `timeout` seconds to wait until no request holds memory."""
    refuse_unless_up(context.status)
    if not 0.0 <= timeout <= 3600.0:
        raise BadRequest(f"timeout must be between 0 and 3600 seconds, got {timeout}", param="timeout")
    end = time.monotonic() + timeout
    result = await context.tokenizer_manager.flush_cache()
    while not result.success and time.monotonic() < end:
        await asyncio.sleep(FLUSH_RETRY_S)
        result = await context.tokenizer_manager.flush_cache()
    if not result.success:
        raise BadRequest(result.message)
    return PlainTextResponse("Cache flushed.\n")


@router.post("/abort_request")
async def abort_request(body: Body, context: Context) -> Response:
    """End a request, or all; an unknown rid is no error, for it may just have finished."""
    request = parse(AbortRequest, body)
    if not request.rid and not request.abort_all:
        raise BadRequest("give the rid of a request, or abort_all: true", param="rid")
    context.tokenizer_manager.abort_request(rid=request.rid or "", abort_all=bool(request.abort_all))
    return Response()


# ---------------------------------------------------------------- tokenizer


@router.post("/v1/tokenize")
@router.post("/tokenize")
async def tokenize(body: Body, context: Context) -> Response:
    request = parse(TokenizeRequest, body)
    check_model(request.model, context.facts)
    special = request.add_special_tokens is not False
    encode = context.tokenizer.encode
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    rows = await _off_loop(
        sum(map(len, prompts)), lambda: [encode(text, add_special_tokens=special) for text in prompts]
    )
    counts = [len(row) for row in rows]
    single = isinstance(request.prompt, str)
    return json_response(
        {
            "tokens": rows[0] if single else rows,
            "count": counts[0] if single else counts,
            "max_model_len": context.facts.context_len,
        }
    )


@router.post("/v1/detokenize")
@router.post("/detokenize")
async def detokenize(body: Body, context: Context) -> Response:
    request = parse(DetokenizeRequest, body)
    check_model(request.model, context.facts)
    tokens: Any = request.tokens and ids_of(request.tokens, "tokens")
    single = is_ids(tokens)
    rows: list[list[int]] = [tokens] if single else tokens
    for row in rows:
        _check_vocabulary(row, context.facts.vocab_size)
    skip = request.skip_special_tokens is not False
    decode = context.tokenizer.decode
    texts = await _off_loop(
        sum(map(len, rows)), lambda: [decode(row, skip_special_tokens=skip) for row in rows]
    )
    return json_response({"text": texts[0] if single else texts})


# ---------------------------------------------------------------- parsers


@router.post("/parse_function_call")
async def parse_function_call(body: Body, context: Context) -> Response:
    """The content and the calls of a finished text."""
    request = parse(ParseFunctionCallRequest, body)
    check_tools(request.tools)
    detector = detector_of(_chosen(request.tool_call_parser, context.tool_call_parser, "tool_call_parser"))
    parser = FunctionCallParser(detector, [tool.function.name for tool in request.tools])
    text, calls = await _off_loop(len(request.text), lambda: parser.parse(request.text))
    return json_response({"normal_text": text, "calls": calls})


@router.post("/separate_reasoning")
async def separate_reasoning(body: Body, context: Context) -> Response:
    """The thoughts and the answer of a finished text."""
    request = parse(SeparateReasoningRequest, body)
    form = format_of(_chosen(request.reasoning_parser, context.reasoning_parser, "reasoning_parser"))
    thoughts, text = ReasoningParser(form).parse(request.text)
    return json_response({"reasoning_text": thoughts, "text": text})


def _chosen(given: str | None, default: str | None, name: str) -> str:
    """The format that a request names, else the server's."""
    chosen = given or default
    if chosen is None:
        flag = f"--{name.replace('_', '-')}"
        raise BadRequest(f"{name}: this field is required, as the server has no {flag}", param=name)
    return chosen


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work`; in a thread if its `size` in characters or ids would hold up every stream."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def _check_vocabulary(ids: list[int], vocab_size: int) -> None:
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise BadRequest(
            f"tokens: id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param="tokens"
        )
