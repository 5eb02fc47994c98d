"""Errors as HTTP: one JSON shape everywhere, `{"error": {message, type, param, code}}`, and never a 422.

Mirrors the exception handlers and `validate_json_request` of SGLang's http_server; here the native
endpoints use the same shape as the OpenAI ones.
Imports: errors.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from sgviz.errors import BadRequest, ClientDisconnected, NotFound, SgvizError, from_status

logger = logging.getLogger(__name__)
BEARER = {"WWW-Authenticate": "Bearer"}
MOST_OF_A_MESSAGE = 1_500  # characters; it may quote what a client sent


def error_body(error: SgvizError) -> dict[str, Any]:
    """The OpenAI error object; `code` is the HTTP status, as in SGLang."""
    message = _shortened(error.message)
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.status}}


def _shortened(message: str) -> str:
    """`message` without its middle where it is too long: what is wrong stands before, what is allowed behind it."""
    if len(message) <= MOST_OF_A_MESSAGE:
        return message
    return f"{message[: MOST_OF_A_MESSAGE // 3]} ... {message[-MOST_OF_A_MESSAGE // 3 :]}"


def error_response(error: SgvizError) -> Response:
    headers = BEARER if error.status == 401 else None
    return json_response(error_body(error), error.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`content` as strict JSON: NaN and infinities become null."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def as_sgviz_error(error: BaseException) -> SgvizError:
    """What a client is told about an exception: one that sgviz did not raise on purpose is ours, logged, a 500."""
    if isinstance(error, SgvizError):
        return error
    if isinstance(error, ClientDisconnect):
        return ClientDisconnected("the client hung up")
    if isinstance(error, HTTPException):
        return from_status(error.status_code, str(error.detail))
    logger.error("request failed", exc_info=error)
    return SgvizError(f"internal error: {type(error).__name__}: {error}")


async def validate_json_request(request: Request) -> dict[str, Any]:
    """Dependency of every endpoint with a body: content type, JSON, and an object on top.

    Raises:
        BadRequest: what is wrong with the body.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise BadRequest(f"content type must be application/json, got {content_type or 'none'!r}")
    try:
        body = msgspec.json.decode(await request.body())
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def install_error_handlers(app: FastAPI) -> None:
    """Every way out of the app has the one shape."""

    async def handle(request: Request, error: Exception) -> Response:
        response = error_response(as_sgviz_error(error))
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    async def handle_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404 and error.detail == "Not Found":
            return error_response(NotFound(f"no such path: {request.method} {request.url.path}"))
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            error.detail = f"{request.method} is not allowed for {request.url.path}; use {allowed}"
        return await handle(request, error)

    async def handle_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return error_response(BadRequest(f"{where}: {first['msg']}", param=where))

    for kind in (SgvizError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(RequestValidationError, handle_validation)
