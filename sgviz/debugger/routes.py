"""POST /sgviz/debug: the debugger's door for other processes. Mounted only on a server with --enable-debugger.

The body is one command: `{"session": "any name of yours", "op": "attach"}`, then `resume`, `pause`, `wait`, `look`,
`add_breakpoint`, ... as in `sgviz.messages.debug`; the answer has the status, and what was asked for. It takes the
admin key if one is set, else the API key. SGLang has no counterpart. Imports: serving, debugger.bridge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.responses import Response

from sgviz.debugger.bridge import Asked, DebugBridge
from sgviz.errors import BadRequest
from sgviz.serving.auth import AuthLevel
from sgviz.serving.http_errors import json_response, validate_json_request
from sgviz.tokenizer_manager import TokenizerManager

PATH = "/sgviz/debug"
MAX_SESSION = 100


def debug_mount(manager: TokenizerManager) -> Callable[[FastAPI], None]:
    """What adds the endpoint to an app."""
    bridge = DebugBridge(manager)

    async def debug(body: Annotated[dict[str, Any], Depends(validate_json_request)]) -> Response:
        session = body.pop("session", None)
        if not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION:
            raise BadRequest(
                "give your debugger a name: session, a text of 1 to 100 characters", param="session"
            )
        return json_response(await bridge.ask(session, command_of(body)))

    def mount(app: FastAPI) -> None:
        app.state.access.declare(PATH, AuthLevel.ADMIN_OPTIONAL)
        app.add_api_route(PATH, debug, methods=["POST"])

    return mount


def command_of(body: dict[str, Any]) -> Asked:
    """The command in a body. Raises BadRequest that names what is wrong."""
    try:
        command: Asked = msgspec.convert(body, Asked)
    except msgspec.ValidationError as error:
        raise BadRequest(f"no such debugger command: {error}") from None
    return command
