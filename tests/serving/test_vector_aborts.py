"""Vectors, scores and rankings that somebody ends: an error for the whole request, never half an answer; priorities."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from sgviz.engine import Engine
from sgviz.errors import Unavailable
from sgviz.events.schema import QueueEntered

NUMBERS = itertools.count()


def text() -> str:
    """Several chunks that no cache has, so that an end comes in between."""
    first = next(NUMBERS)
    return " ".join(f"word{first}.{number}" for number in range(30))


BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "/v1/embeddings": lambda: {"input": [text(), text()]},
    "/encode": lambda: {"text": text()},
    "/v1/score": lambda: {"query": text(), "items": ["a", "b"], "label_token_ids": [1, 2]},
    "/v1/rerank": lambda: {"query": text(), "documents": ["a", "b"]},
}
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module", params=[False, True], ids=["generates", "embeds_only"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        "tiny-llama",
        device="mock",
        mock_step_ms=60.0,
        chunked_prefill_size=16,
        is_embedding=request.param,
        enable_priority_scheduling=True,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def ask(engine: Engine) -> Iterator[Ask]:
    with httpx.Client(base_url=engine.serve(port=0).url, timeout=60) as client:

        def post(path: str, body: object = None) -> httpx.Response:
            return client.post(path, json={} if body is None else body)

        yield post


def bodies(engine: Engine) -> list[str]:
    """The endpoints of that engine: scores need tokens, and rankings by tokens those for yes and no."""
    without = "/v1/score" if engine.settings.model.is_embedding else "/v1/rerank"
    return [path for path in BODIES if path != without]


def ended(engine: Engine, ask: Ask, path: str, end: Callable[[], object]) -> httpx.Response:
    """The answer to a request that `end` ended while it was under way."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, path, BODIES[path]())
        deadline = time.monotonic() + 20
        while not engine.pipeline.manager.rid_to_state:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        end()
        return answer.result(20)


def refuse(answer: httpx.Response, words: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (503, "ServiceUnavailableError", 503), (
        answer.text
    )
    assert words in error["message"]


def abort_all(ask: Ask) -> None:
    assert ask("/abort_request", {"abort_all": True}).status_code == 200


@contextmanager
def paused(ask: Ask, mode: str) -> Iterator[None]:
    assert ask("/pause_generation", {"mode": mode}).status_code == 200
    try:
        yield
    finally:
        assert ask("/continue_generation").status_code == 200


def test_under_way(engine: Engine, ask: Ask) -> None:
    for path in bodies(engine):
        refuse(ended(engine, ask, path, lambda: abort_all(ask)), "aborted by its caller")
        assert ask(path, BODIES[path]()).status_code == 200


def test_by_a_pause_that_aborts(engine: Engine, ask: Ask) -> None:
    for path in bodies(engine):
        with ExitStack() as pause:
            refuse(ended(engine, ask, path, lambda: pause.enter_context(paused(ask, "abort"))), "pause")


def test_in_a_pause(engine: Engine, ask: Ask) -> None:
    for path in bodies(engine):
        with paused(ask, "in_place"):
            refuse(ended(engine, ask, path, lambda: abort_all(ask)), "aborted by its caller")


def test_from_python(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.encode, [text(), text()], rid="mine")
        deadline = time.monotonic() + 20
        while not engine.pipeline.manager.rid_to_state:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        engine.abort("mine_0")
        with pytest.raises(Unavailable, match="aborted"):
            answer.result(20)
    state = engine.internal_state()
    assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0


def test_priorities_are_taken(engine: Engine, ask: Ask) -> None:
    for path in bodies(engine):
        assert (
            ask(path, {**BODIES[path](), "priority": 3, "rid": f"p{path.replace('/', '-')}"}).status_code
            == 200
        )
        wrong = ask(path, {**BODIES[path](), "priority": "high"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "priority"
    told = [event.body for event in engine.pipeline.ring.snapshot()]
    entered = [body for body in told if isinstance(body, QueueEntered) and body.rid.startswith("p-")]
    assert len(entered) >= len(bodies(engine)) and {body.priority for body in entered} == {3}
