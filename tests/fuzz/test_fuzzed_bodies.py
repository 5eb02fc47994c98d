"""Whatever is sent, the answer is no fault of the server, it comes, and the server is as it was.

Quick: a look. Slow: 2,000 bodies. Long: 20,000.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[1] / "pitfalls"))  # pitfall_tools
sys.path.append(str(Path(__file__).resolve().parent))

from fuzz_bodies import ENDPOINTS, payload_of
from pitfall_tools import Served, serving

PATIENCE_S = 60.0
CONTROL = {
    "text": "Once upon a time",
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
}
EVERY = 50  # bodies, and then one whose answer is known
GENERATING = ("/v1/chat/completions", "/v1/completions", "/generate")
request_of = st.one_of(
    [st.tuples(st.just(path), payload_of(path)) for path in (*GENERATING, *GENERATING, *ENDPOINTS)]
)


def _no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


class Target:
    """A served engine under fire."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.statuses: Counter[int] = Counter()
        self._expected = self._control()

    def fire(self, path: str, payload: bytes) -> None:
        """Send it and check the answer; now and then also one whose answer is known."""
        try:
            self._fire(path, payload)
        except (AssertionError, httpx.HTTPError) as error:
            error.add_note(f"POST {path} {payload[:1000]!r}, {len(payload)} bytes")
            raise
        if self.statuses.total() % EVERY == 0:
            self.check()

    def _fire(self, path: str, payload: bytes) -> None:
        answer = self.served.http.post(path, content=payload, headers={"content-type": "application/json"})
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            error = strict(answer.text)["error"]
            assert error["code"] == answer.status_code and error["message"] and error["message"].isprintable()
            assert len(error["message"]) < 2000, error
        elif answer.headers.get("content-type", "").startswith("text/event-stream"):
            self._check_events(answer)
        elif answer.content:
            strict(answer.text)

    def check(self) -> None:
        """It is idle and balanced, and answers as it did at first."""
        self.served.assert_empty()
        assert self._control() == self._expected

    def _check_events(self, answer: httpx.Response) -> None:
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        parts = [strict(event) for event in events if event != "[DONE]"]
        failed = [part["error"] for part in parts if "error" in part]
        assert all(400 <= error["code"] < 500 for error in failed), failed
        assert (events.count("[DONE]") == 1 and events[-1] == "[DONE]") or failed

    def _control(self) -> str:
        answer = self.served.post("/generate", CONTROL)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text"])


@pytest.fixture(scope="module", params=["normal", "overlap"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    settings = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3", "context_length": 96}
    with serving(event_loop=request.param, max_total_tokens=2048, grammar_timeout=10.0, **settings) as served:
        served.http.timeout = httpx.Timeout(PATIENCE_S)
        yield Target(served)


def bombard(target: Target, count: int) -> None:
    """Send `count` bodies; hypothesis makes the one that is answered wrongly small."""

    @hypothesis.settings(
        max_examples=count, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(request_of)
    def shoot(sent: tuple[str, bytes]) -> None:
        target.fire(*sent)

    before = target.statuses.copy()
    shoot()
    target.check()
    got = target.statuses - before
    assert got.total() >= count
    assert got[200] > count // 20 and got[400] > count // 5, got  # of both sorts
    assert set(got) <= {200, 400, 404}, got


def test_a_few_bodies(target: Target) -> None:
    bombard(target, 60)


@pytest.mark.slow
def test_a_thousand_bodies_a_loop(target: Target) -> None:
    bombard(target, 1_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_bodies_a_loop(target: Target) -> None:
    bombard(target, 10_000)


@pytest.mark.parametrize("path", [*ENDPOINTS, "/flush_cache", "/v1/models", "/health", "/nothing"])
def test_wrong_methods_types_and_queries_are_no_fault_of_the_server(target: Target, path: str) -> None:
    http = target.served.http
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert http.request(method, path, params={"timeout": "nan", "x": "\x00"}).status_code < 500
    for kind in ("", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "\xff"):
        headers = {"content-type": kind.encode("latin-1")}
        assert http.post(path, content=b"{}", headers=headers).status_code < 500
    for timeout in ("", "x", "-1", "1e999", "nan"):
        assert http.get("/flush_cache", params={"timeout": timeout}).status_code < 500
    target.check()
