"""Endpoints for those who run the server: what is logged of requests.

Mirrors SGLang's `/configure_logging`; here the answer says how it is then.
Imports: errors.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from sgviz.errors import NotFound
from sgviz.serving.http_errors import json_response
from sgviz.serving.protocol import parse
from sgviz.serving.routes import Body, Context

router = APIRouter()


class ConfigureLogging(msgspec.Struct, frozen=True):
    """POST /configure_logging: what is not given stays as it is."""

    log_requests: bool | None = None
    log_requests_level: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None
    log_requests_format: Literal["text", "json"] | None = None


@router.post("/configure_logging")
async def configure_logging(body: Body, context: Context) -> Response:
    """Switch the request log on or off, or change how much it tells."""
    if context.request_log is None:
        raise NotFound("this server has no request log")
    wanted = parse(ConfigureLogging, body)
    return json_response(
        context.request_log.configure(
            wanted.log_requests, wanted.log_requests_level, wanted.log_requests_format
        )
    )
