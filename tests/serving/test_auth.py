"""Keys: the three levels against every combination of configured and sent keys."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from fastapi import FastAPI
from serving_tools import MODEL, Served, chat, error_of, served

from sgviz.serving import AccessRules, AuthLevel, Keys
from sgviz.serving.auth import check_access

API, ADMIN = "user-key", "admin-key"
OK, NO, NEVER = 200, 401, 403
# level, configured keys (api, admin) -> outcome for: nothing sent, the API key, the admin key
MATRIX = [
    (AuthLevel.OPEN, (API, ADMIN), (OK, OK, OK)),
    (AuthLevel.NORMAL, (None, None), (OK, OK, OK)),
    (AuthLevel.NORMAL, (API, None), (NO, OK, NO)),
    (AuthLevel.NORMAL, (None, ADMIN), (OK, OK, OK)),
    (AuthLevel.NORMAL, (API, ADMIN), (NO, OK, NO)),
    (AuthLevel.ADMIN_OPTIONAL, (None, None), (OK, OK, OK)),
    (AuthLevel.ADMIN_OPTIONAL, (API, None), (NO, OK, NO)),
    (AuthLevel.ADMIN_OPTIONAL, (None, ADMIN), (NO, NO, OK)),
    (AuthLevel.ADMIN_OPTIONAL, (API, ADMIN), (NO, NO, OK)),
    (AuthLevel.ADMIN_FORCE, (None, None), (NEVER, NEVER, NEVER)),
    (AuthLevel.ADMIN_FORCE, (API, None), (NEVER, NEVER, NEVER)),
    (AuthLevel.ADMIN_FORCE, (None, ADMIN), (NO, NO, OK)),
    (AuthLevel.ADMIN_FORCE, (API, ADMIN), (NO, NO, OK)),
]


@pytest.mark.parametrize(("level", "keys", "outcomes"), MATRIX)
def test_matrix(level: AuthLevel, keys: tuple[Any, Any], outcomes: tuple[int, int, int]) -> None:
    configured = Keys(api_key=keys[0], admin_api_key=keys[1])
    for header, outcome in zip(("", f"Bearer {API}", f"bearer {ADMIN}"), outcomes):
        error = check_access(level, configured, header)
        assert (200 if error is None else error.status) == outcome


@pytest.mark.parametrize(
    "header", ["Bearer", "Bearer ", f"Basic {API}", API, f"Bearer {API}x", "Bearer \xff", "Bearer x"]
)
def test_near_misses(header: str) -> None:
    error = check_access(AuthLevel.NORMAL, Keys(api_key=API), header)
    assert error is not None and error.status == 401


def test_the_longest_rule_wins_and_nothing_declared_is_normal() -> None:
    rules = AccessRules()
    rules.declare("/sgviz", AuthLevel.ADMIN_OPTIONAL)
    rules.declare("/sgviz/open", AuthLevel.OPEN)
    assert rules.level_of("/sgviz") is rules.level_of("/sgviz/a/b") is AuthLevel.ADMIN_OPTIONAL
    assert rules.level_of("/sgviz/open/x") is AuthLevel.OPEN
    for path in ("/sgvizier", "/new", "/"):
        assert rules.level_of(path) is AuthLevel.NORMAL
    assert rules.level_of("/health") is AuthLevel.OPEN and rules.level_of("/metrics/x") is AuthLevel.OPEN
    assert rules.level_of("/healthy") is AuthLevel.NORMAL


def mount_later(app: FastAPI) -> None:
    """What a bridge does: one route that declares its level and one that forgets to."""
    app.state.access.declare("/sgviz", AuthLevel.ADMIN_OPTIONAL)
    app.state.access.declare("/force", AuthLevel.ADMIN_FORCE)
    for path in ("/sgviz/state", "/forgotten", "/force", "/metrics"):
        app.add_api_route(path, lambda: "ok")


def status(server: Served, path: str, key: str | None, method: str = "GET") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = server.http.request(method, path, headers=headers)
    if response.status_code in (401, 403):
        error_of(response)
        assert ("www-authenticate" in response.headers) == (response.status_code == 401)
    return response.status_code


def test_every_endpoint_is_guarded() -> None:
    with served(keys=Keys(api_key=API, admin_api_key=ADMIN), mounts=[mount_later]) as server:
        for path in ("/health", "/health_generate", "/ready", "/ping", "/metrics"):
            assert status(server, path, None) == 200
        for path in ("/v1/models", "/model_info", "/get_server_info", "/forgotten"):
            assert [status(server, path, key) for key in (None, API, ADMIN)] == [401, 200, 401]
        for path in ("/sgviz/state", "/flush_cache", "/force"):
            assert [status(server, path, key) for key in (None, API, ADMIN)] == [401, 401, 200]
        assert status(server, "/no/such/path", None) == 401
        for path in ("/v1/chat/completions", "/v1/embeddings", "/encode", "/v1/score", "/v1/rerank"):
            assert status(server, path, None, "POST") == 401
        assert status(server, "/v1/models", None, "OPTIONS") == 405
        assert "***" in server.http.get("/server_info", headers={"Authorization": f"Bearer {API}"}).text
        assert not server.manager.requests


def test_forced_endpoints_without_an_admin_key() -> None:
    with served(mounts=[mount_later]) as server:
        assert [status(server, "/force", key) for key in (None, API)] == [403, 403]
        assert status(server, "/sgviz/state", None) == 200


def test_openai_client_with_keys() -> None:
    with served(keys=Keys(api_key=API)) as server:
        messages: Any = chat()["messages"]
        assert server.client(API).chat.completions.create(model=MODEL, messages=messages).choices
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").chat.completions.create(model=MODEL, messages=messages)
