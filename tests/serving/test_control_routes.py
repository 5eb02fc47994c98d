"""Health, facts, flush, abort, tokenizer endpoints."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from serving_tools import CONTEXT, MODEL, VOCAB, CharTokenizer, Served, error_of

from sgviz.messages.generate import LONG_TEXT
from sgviz.serving import ServerState

HEALTH = ("/health", "/health_generate", "/ready", "/ping")


@pytest.mark.parametrize("path", HEALTH)
def test_health_follows_the_status(server: Served, path: str) -> None:
    codes = []
    for state in ServerState:
        server.status.state = state
        codes.append(server.http.get(path).status_code)
    assert codes == [503, 200, 503, 503]
    server.status.message = "the scheduler died"
    assert "the scheduler died" in error_of(server.http.get(path))["message"]


def test_probes_that_fail(server: Served) -> None:
    server.manager.healthy = False
    assert [server.http.get(path).status_code for path in HEALTH] == [503, 503, 200, 200]
    server.context.health_generation = False
    assert [server.http.get(path).status_code for path in HEALTH] == [200, 503, 200, 200]


def test_facts(server: Served) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = server.http.get(path).json()
        assert info["model_path"] == "/models/tiny" and info["is_generation"] is True
        assert (info["context_len"], info["vocab_size"]) == (CONTEXT, VOCAB)
    for path in ("/server_info", "/get_server_info"):
        info = server.http.get(path).json()
        assert (
            info["internal_states"] == [{"waiting": 0}] and info["page_size"] == 1 and info["status"] == "up"
        )
    card = server.http.get(f"/v1/models/{MODEL}").json()
    assert card["id"] == MODEL and card["max_model_len"] == CONTEXT
    assert server.http.get("/v1/models").json() == {"object": "list", "data": [card]}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(server: Served, method: str) -> None:
    server.manager.busy = 2
    assert "1 requests hold memory" in error_of(server.http.request(method, "/flush_cache"))["message"]
    server.manager.busy = 3
    response = server.http.request(method, "/flush_cache?timeout=5")
    assert response.status_code == 200 and "flushed" in response.text
    for bad in ("x", "-1", "nan", "1e9"):
        assert error_of(server.http.request(method, f"/flush_cache?timeout={bad}"))["code"] == 400


def test_abort_request(server: Served) -> None:
    for body in ({"rid": "x"}, {"rid": "x"}, {"abort_all": True, "rid": None}):
        assert server.http.post("/abort_request", json=body).status_code == 200
    assert server.manager.aborts == [("x", False), ("x", False), ("", True)]


class Watched(CharTokenizer):
    """Notes the thread of every call."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().encode(text, add_special_tokens)

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str:
        self.threads.append(threading.get_ident())
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    ("path", "short", "long"),
    [
        ("/tokenize", {"prompt": "a"}, {"prompt": "a" * (LONG_TEXT + 1)}),
        ("/tokenize", {"prompt": ["a"]}, {"prompt": ["a" * 500] * (LONG_TEXT // 500 + 1)}),
        ("/detokenize", {"tokens": [97]}, {"tokens": [97] * (LONG_TEXT + 1)}),
    ],
)
def test_long_texts_leave_the_event_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, short: dict[str, Any], long: dict[str, Any]
) -> None:
    watched = Watched()
    monkeypatch.setattr(server.context, "tokenizer", watched)
    server.http.post(path, json=short)
    (of_the_loop,) = watched.threads
    assert server.http.post(path, json=long).status_code == 200
    assert of_the_loop not in watched.threads[1:] and len(watched.threads) > 1


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(server: Served, prefix: str) -> None:
    one = server.http.post(f"{prefix}/tokenize", json={"prompt": "hi"}).json()
    assert one == {"tokens": [1, 104, 105], "count": 3, "max_model_len": CONTEXT}
    two = server.http.post(
        f"{prefix}/tokenize", json={"prompt": ["a", "bc"], "add_special_tokens": False}
    ).json()
    assert (two["tokens"], two["count"]) == ([[97], [98, 99]], [1, 2])
    detokenize = f"{prefix}/detokenize"
    assert server.http.post(detokenize, json={"tokens": [1, 104, 105]}).json() == {"text": "hi"}
    assert server.http.post(detokenize, json={"tokens": [[97], []]}).json() == {"text": ["a", ""]}
    assert server.http.post(detokenize, json={"tokens": []}).json() == {"text": ""}
    raw = server.http.post(detokenize, json={"tokens": [1, 97], "skip_special_tokens": False})
    assert raw.json() == {"text": "\x01a"}
