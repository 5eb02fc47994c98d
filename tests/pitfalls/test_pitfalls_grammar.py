"""Constrained output: what cannot be compiled is an error for its own request, and for nobody else."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from pitfall_tools import MODEL, Served

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BROKEN: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": {"type": "array", "uniqueItems": True}},
    "circular": {"json_schema": {"$ref": "#"}},
    "regex": {"regex": "[a-z"},
    "ebnf": {"ebnf": "root ::= missing"},
    "structural_tag": {"structural_tag": {"structures": [], "triggers": ["<"]}},
}


def body(path: str, **grammar: Any) -> dict[str, Any]:
    if path == NATIVE:
        return {"text": "hello", "sampling_params": {"max_new_tokens": 12, "temperature": 0, **grammar}}
    shape: dict[str, Any] = {"prompt": "hello"}
    if path == CHAT:
        shape = {"messages": [{"role": "user", "content": "hello"}]}
    return {"model": MODEL, "max_tokens": 12, "temperature": 0, **shape, **grammar}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_grammar_that_cannot_be_compiled_is_an_error_for_that_request_alone(
    server: Served, kind: str, path: str, stream: bool
) -> None:
    """Never an unconstrained answer and never a dead scheduler. sgl-project/sglang#4574, sgl-project/sglang#1776,
    sgl-project/sglang#6803, huggingface/text-generation-inference#2280, vllm-project/vllm#17313
    """
    beside: list[Any] = []
    other = threading.Thread(
        target=lambda: beside.append(server.post(TEXT, body(TEXT, regex="[a-c]{4}")).json())
    )
    other.start()
    answer = server.post(path, {**body(path, **BROKEN[kind]), "stream": stream})
    other.join()
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    (field,) = BROKEN[kind]
    assert f"the {field} cannot be compiled" in answer.json()["error"]["message"]
    assert re.fullmatch("[a-c]{4}", beside[0]["choices"][0]["text"])
    assert server.post(TEXT, body(TEXT, regex="[a-c]{4}")).json() is not None
