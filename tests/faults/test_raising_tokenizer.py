"""A tokenizer that raises ends the requests it raises at, wherever it is used, and nobody else's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sgviz.engine import Engine
from sgviz.model.tokenizer import Tokenizer

MARK = "raise here"
BAD_TOKEN = 77
FAULT = "the vocabulary is damaged"
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
BIASED = {**GREEDY, "logit_bias": {str(BAD_TOKEN): 100}}


class Damaged(RuntimeError):
    """What the tokenizer raises."""


def damage(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the method `name` raise at texts with the mark, and at ids with the bad token."""
    inner = getattr(Tokenizer, name)

    def outer(self: Tokenizer, given: Any, *args: Any, **kwargs: Any) -> Any:
        if MARK in given if isinstance(given, str) else _has_bad(given):
            raise Damaged(FAULT)
        return inner(self, given, *args, **kwargs)

    patch.setattr(Tokenizer, name, outer)


def _has_bad(ids: Any) -> bool:
    return any(_has_bad(each) if isinstance(each, list) else each == BAD_TOKEN for each in ids)


CASES = [
    pytest.param("encode", {"text": MARK, "sampling_params": GREEDY}, id="in the tokenizer manager"),
    pytest.param("decode_batch", {"input_ids": [5, 6], "sampling_params": BIASED}, id="in the detokenizer"),
    pytest.param(
        "decode",
        {"input_ids": [5, 6], "sampling_params": {**BIASED, "stop": ["zzzz"]}},
        id="in the scheduler, for stop strings",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "body"), CASES)
def test_only_the_request_it_raises_at_ends(
    monkeypatch: pytest.MonkeyPatch, name: str, body: dict[str, Any], stream: bool
) -> None:
    good = {"input_ids": [9, 10, 11], "sampling_params": {**GREEDY, "stop": ["zzzz"], "max_new_tokens": 60}}
    damage(monkeypatch, name)
    with Engine("tiny-llama", max_total_tokens=1024, torch_threads=1) as engine:
        url = engine.serve(port=0).url
        before = httpx.post(f"{url}/generate", json=good, timeout=60).json()
        beside = engine.pipeline.loop.submit(engine.async_generate(**good))
        answer = httpx.post(f"{url}/generate", json={**body, "stream": stream}, timeout=60)
        assert FAULT in answer.text
        if name == "encode" or not stream:
            assert answer.status_code == 500 and answer.json()["error"]["code"] == 500
        assert beside.result(60)["text"] == before["text"]
        assert httpx.post(f"{url}/generate", json=good, timeout=60).json()["text"] == before["text"]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        state = engine.internal_state()
        assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0
        assert state["num_tokenizer_manager_reqs"] == state["num_detokenizer_reqs"] == 0
