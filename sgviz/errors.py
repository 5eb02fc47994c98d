"""The few exceptions of sgviz. Each knows the HTTP status a server answers with.

Imports: nothing. Raised everywhere; turned into an OpenAI error object only in `serving`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SgvizError(Exception):
    """Base of all errors that sgviz raises on purpose.

    Attributes:
        status: HTTP status of the answer.
        type: the `type` of the OpenAI error object.
        param: the request field at fault, if one is.
    """

    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(SgvizError, ValueError):
    """The caller's input is wrong; the message says what, its value and what is allowed."""

    status = 400
    type = "BadRequestError"


class NeverFits(BadRequest):
    """The prompt, or what is asked to follow it, cannot fit into context or KV memory however long it waits."""


class Unauthorized(SgvizError):
    status = 401
    type = "AuthenticationError"


class Forbidden(SgvizError):
    status = 403
    type = "PermissionDeniedError"


class NotFound(SgvizError):
    status = 404
    type = "NotFoundError"


class Unavailable(SgvizError):
    """The engine is full, starting, shutting down, or one of its processes has died."""

    status = 503
    type = "ServiceUnavailableError"


class ClientDisconnected(SgvizError):
    """The client hung up before its answer was complete; nobody reads this error."""

    status = 499
    type = "ClientDisconnected"


class StartupError(SgvizError):
    """The engine could not be started; nothing is left behind."""


class ConfigError(BadRequest):
    """A setting has a value that is not allowed."""


def suggest(name: object, allowed: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest allowed name, or an empty string; `name` may be no string at all."""
    near = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def from_status(
    status: int, message: str, *, param: str | None = None, type: str | None = None
) -> SgvizError:
    """The error that an answer with `status` stands for; it keeps that status, and `type` if one is given."""
    kinds = (BadRequest, Unauthorized, Forbidden, NotFound, Unavailable)
    kind = next((kind for kind in kinds if kind.status == status), SgvizError)
    error = kind(message, param=param)
    error.status = status
    error.type = type or (BadRequest.type if kind is SgvizError and 400 <= status < 500 else kind.type)
    return error
