"""POST /open_session and /close_session. Mirrors SGLang's http_server routes of these names.

Imports: nothing of sgviz but this folder.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from sgviz.serving.http_errors import json_response
from sgviz.serving.protocol import parse
from sgviz.serving.routes import Body, Context
from sgviz.serving.serving_base import refuse_unless_up

router = APIRouter()


class OpenSessionRequest(msgspec.Struct, frozen=True):
    """POST /open_session. `capacity_of_str_len`: characters of a turn's prompt; `timeout`: idle seconds."""

    capacity_of_str_len: int
    session_id: str | None = None
    streaming: bool | None = None
    timeout: float | None = None


class CloseSessionRequest(msgspec.Struct, frozen=True):
    """POST /close_session."""

    session_id: str


@router.api_route("/open_session", methods=["GET", "POST"])
async def open_session(body: Body, context: Context) -> Response:
    """The id of a new session, as a JSON string; 400 if one of that name is open."""
    refuse_unless_up(context.status)
    request = parse(OpenSessionRequest, body)
    session_id = await context.tokenizer_manager.sessions.open(
        request.capacity_of_str_len,
        request.session_id,
        streaming=bool(request.streaming),
        timeout=request.timeout,
    )
    return json_response(session_id)


@router.api_route("/close_session", methods=["GET", "POST"])
async def close_session(body: Body, context: Context) -> Response:
    """Forget a session and end its turns; 400 if none of that name is open."""
    refuse_unless_up(context.status)
    await context.tokenizer_manager.sessions.close(parse(CloseSessionRequest, body).session_id)
    return Response()
