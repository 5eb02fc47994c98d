"""API and admin keys, as a pure ASGI middleware before every route, later ones and mounts included.

Mirrors SGLang's auth decorators: levels NORMAL (the API key, if set), ADMIN_OPTIONAL (the admin key if
set, else the API key), ADMIN_FORCE (403 without a configured admin key). A path that declares nothing
is NORMAL, so a new endpoint is never open by accident.
Imports: errors.
"""

from __future__ import annotations

import hmac
from enum import StrEnum

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sgviz.errors import Forbidden, SgvizError, Unauthorized
from sgviz.serving.context import Keys
from sgviz.serving.http_errors import error_response


class AuthLevel(StrEnum):
    OPEN = "open"
    NORMAL = "normal"
    ADMIN_OPTIONAL = "admin_optional"
    ADMIN_FORCE = "admin_force"


class AccessRules:
    """Levels by path; a rule covers its path and everything below it, and the longest one wins."""

    def __init__(self) -> None:
        self._levels: dict[str, AuthLevel] = {}
        for path in ("/health", "/health_generate", "/ready", "/ping", "/metrics"):
            self.declare(path, AuthLevel.OPEN)

    def declare(self, path: str, level: AuthLevel) -> None:
        """Set the level of `path` (e.g. "/sgviz") and all paths below it."""
        if not path.startswith("/") or path.endswith("/"):
            raise ValueError(f"a path starts with '/' and does not end with it, got {path!r}")
        self._levels[path] = level

    def level_of(self, path: str) -> AuthLevel:
        while path:
            if path in self._levels:
                return self._levels[path]
            path = path.rpartition("/")[0]
        return AuthLevel.NORMAL


def check_access(level: AuthLevel, keys: Keys, authorization: str) -> SgvizError | None:
    """The error for a request at `level` with this Authorization header, or None if it may pass."""
    if level is AuthLevel.OPEN:
        return None
    if level is AuthLevel.ADMIN_FORCE and not keys.admin_api_key:
        return Forbidden("this endpoint needs a server with an admin key (admin_api_key)")
    admin = level is not AuthLevel.NORMAL and bool(keys.admin_api_key)
    wanted = keys.admin_api_key if admin else keys.api_key
    if not wanted or _bearer_is(authorization, wanted):
        return None
    kind = "admin" if admin else "API"
    return Unauthorized(f"a valid {kind} key is needed: send the header 'Authorization: Bearer <key>'")


def _bearer_is(authorization: str, key: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    # headers arrive as latin-1; comparing bytes takes the same time wherever they differ
    return hmac.compare_digest(token.strip().encode("latin-1"), key.encode()) and scheme.lower() == "bearer"


class AuthMiddleware:
    """Answers 401 or 403 itself; what may pass is passed on untouched."""

    def __init__(self, app: ASGIApp, *, keys: Keys, rules: AccessRules) -> None:
        self.app = app
        self._keys = keys
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": error.message})
        else:
            await error_response(error)(scope, receive, send)

    def _check(self, scope: Scope) -> SgvizError | None:
        if scope.get("method") == "OPTIONS":
            return None
        authorization = Headers(scope=scope).get("authorization", "")
        return check_access(self._rules.level_of(scope["path"]), self._keys, authorization)
