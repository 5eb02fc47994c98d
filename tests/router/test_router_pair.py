"""A prefill server, a decode server and a router as real processes: the text of a single server, and deaths."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest
from pair_processes import COMMON, RouterProcess, ServerProcess, pair, side

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox"}]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with pair() as both:
        yield both


def said(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="tiny-llama",
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,  # type: ignore[arg-type]
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_streamed_chat_is_that_of_a_single_server(servers: tuple[ServerProcess, ServerProcess]) -> None:
    prefill, decode = servers
    with (
        ServerProcess(*COMMON) as single,
        RouterProcess("--prefill", prefill.url, "--decode", decode.url) as router,
    ):
        assert said(router.url) == said(single.url) != ""


def test_a_side_without_a_room_refuses_by_name(servers: tuple[ServerProcess, ServerProcess]) -> None:
    for server in servers:
        response = httpx2.post(f"{server.url}/generate", json={"text": "a"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "bootstrap_room"
        assert httpx2.get(f"{server.url}/health").status_code == 200


def test_a_bootstrap_port_in_use_ends_the_start(servers: tuple[ServerProcess, ServerProcess]) -> None:
    port = httpx2.get(f"{servers[0].url}/server_info").json()["disaggregation_bootstrap_port"]
    with side("prefill", "--disaggregation-bootstrap-port", str(port)) as second:
        assert second.wait(60.0) == 1
        assert f"127.0.0.1:{port}" in second.text() and "Traceback" not in second.text()
