"""An OpenAI client before a router, a prefill server and two decode servers, all real processes on the mock device."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from pair_processes import RouterProcess, ServerProcess, side

from sgviz.events.schema import RouterFailed
from sgviz.recording import load, load_pair

MOCK = ("--device", "mock", "--mock-step-ms", "10")
CHAT: dict[str, Any] = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Tell me a story"}]}
pytestmark = pytest.mark.slow


class Servers:
    """What is under test; `folder` has their recordings."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        def started(name: str) -> ServerProcess:
            mode = "prefill" if name == "p" else "decode"
            return stack.enter_context(side(mode, *MOCK, "--record", str(folder / f"{name}.sgv")))

        self.folder = folder
        self.prefill, self.decode, self.second = (started(name) for name in ("p", "d", "e"))
        for each in self.all:
            each.wait_ready()
        self.router = stack.enter_context(
            RouterProcess(
                "--prefill", self.prefill.url, "--decode", self.decode.url, "--decode", self.second.url,
                "--record", str(folder / "r.sgv"), "--policy", "round_robin",
            )
        )  # fmt: skip
        self.client = openai.OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0)
        stack.callback(self.client.close)

    @property
    def all(self) -> list[ServerProcess]:
        return [self.prefill, self.decode, self.second]

    def busy(self) -> int:
        """Requests that any of the servers knows."""
        info = httpx2.get(f"{self.router.url}/server_info").json()
        states = [
            state
            for name in ("prefill", "decode")
            for each in info[name]
            for state in each["internal_states"]
        ]
        assert len(states) == 3
        return sum(state["num_live_reqs"] + state["num_tokenizer_manager_reqs"] for state in states)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("router"), stack)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_answers_and_streams_are_those_of_a_server(servers: Servers) -> None:
    client = servers.client
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    whole = client.chat.completions.create(**CHAT, max_tokens=12, temperature=0)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            **CHAT, max_tokens=12, temperature=0, stream=True, stream_options=options
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert len([chunk for chunk in chunks if chunk.choices]) > 3
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.id.startswith("chatcmpl-") and whole.choices[0].finish_reason == "length"


def test_lists_of_prompts_and_several_answers_each(servers: Servers) -> None:
    several = servers.client.completions.create(
        model="tiny-llama", prompt=["one", "two", "three"], n=2, max_tokens=3
    )
    assert [choice.index for choice in several.choices] == list(range(6))
    body = {"text": ["a", "b"], "rid": "pair", "sampling_params": {"max_new_tokens": 3, "n": 2}}
    answers = httpx2.post(f"{servers.router.url}/generate", json=body).json()
    assert [each["meta_info"]["id"] for each in answers] == ["pair_0_0", "pair_0_1", "pair_1_0", "pair_1_1"]
    ids = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
    answer = httpx2.put(f"{servers.router.url}/generate", json=ids).json()
    assert len(answer["output_ids"]) == 1 and answer["meta_info"]["prompt_tokens"] == 3


def test_errors_are_those_of_a_server(servers: Servers) -> None:
    client = servers.client
    with pytest.raises(openai.BadRequestError, match="messages must not be empty"):
        client.chat.completions.create(model="tiny-llama", messages=[])
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="makes no vectors"):
        client.embeddings.create(model="tiny-llama", input="a")
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="tiny-llama", prompt=[5] * 3000, stream=True)
    with pytest.raises(openai.NotFoundError, match="does not pass on"):
        client.responses.create(model="tiny-llama", input="a")
    with pytest.raises(openai.BadRequestError, match="X-Data-Parallel-Rank"):
        client.completions.create(
            model="tiny-llama", prompt="a", extra_headers={"X-Data-Parallel-Rank": "one"}
        )
    for url in (servers.router.url, servers.decode.url):
        response = httpx2.post(
            f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"}
        )
        assert response.status_code == 400 and "not valid JSON" in response.json()["error"]["message"]


def test_a_client_that_leaves_and_an_abort_end_it_on_every_server(servers: Servers) -> None:
    stream = servers.client.chat.completions.create(**CHAT, max_tokens=1500, stream=True)
    next(iter(stream))
    assert servers.busy() >= 1
    stream.close()
    until(lambda: servers.busy() == 0)
    stream = servers.client.chat.completions.create(
        **CHAT, max_tokens=1500, stream=True, extra_body={"rid": "mine"}
    )
    chunks = iter(stream)
    next(chunks)
    answer = httpx2.post(f"{servers.router.url}/abort_request", json={"rid": "mine"}).json()
    assert answer["success"] and len(answer["servers"]) == 3
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
    until(lambda: servers.busy() == 0)


def test_flush_health_and_metrics(servers: Servers) -> None:
    until(lambda: servers.busy() == 0)
    url = servers.router.url
    flushed = httpx2.post(f"{url}/flush_cache", params={"timeout": 10}).json()
    assert flushed["success"] and len(flushed["servers"]) == 3
    for path in ("/health", "/health_generate", "/ping"):
        assert httpx2.get(url + path).status_code == 200
    assert f'url="{servers.decode.url}"' in httpx2.get(f"{url}/metrics").text
    loads = httpx2.get(f"{url}/v1/loads").json()["servers"]
    assert set(loads) == {each.url for each in servers.all}


def test_a_killed_decode_server_ends_its_stream_and_the_other_serves_on(servers: Servers) -> None:
    until(lambda: servers.busy() == 0)
    while True:  # until one is on the second server
        stream = servers.client.chat.completions.create(**CHAT, max_tokens=1500, stream=True)
        next(iter(stream))
        decode = httpx2.get(f"{servers.router.url}/server_info").json()["decode"]
        if next(each["requests"] for each in decode if each["url"] == servers.second.url):
            break
        stream.close()
    servers.second.process.send_signal(signal.SIGKILL)
    with pytest.raises(openai.APIError, match="broke off in the middle"):
        for _ in stream:
            pass
    for _ in range(3):
        answer = servers.client.completions.create(model="tiny-llama", prompt="a", max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
    assert httpx2.get(f"{servers.router.url}/health").status_code == 200


def test_ctrl_c_ends_the_router_and_the_recordings_join(servers: Servers) -> None:
    servers.client.completions.create(
        model="tiny-llama", prompt="a", max_tokens=4, extra_body={"rid": "last"}
    )
    assert servers.router.stop(signal.SIGINT) == 0
    for each in (servers.prefill, servers.decode):
        each.signal(signal.SIGINT)
        assert each.wait() == 0
    router = load(servers.folder / "r.sgv")
    kinds = [event.kind for event in router._events]
    assert kinds[0] == "process.started" and set(kinds[1:]) == {"router.paired", "router.failed"}
    assert router.audit().balanced
    failed = [event.body for event in router._events if isinstance(event.body, RouterFailed)]
    assert {(body.side, body.began) for body in failed} >= {("request", False), ("decode", True)}
    assert [body.decode for body in failed if body.began] == [servers.second.url]  # the one that was killed
    pair = load_pair(servers.folder / "p.sgv", servers.folder / "d.sgv", servers.folder / "r.sgv")
    explained = pair.explain("last")
    first = explained.parts[0]
    assert first.side == "router" and servers.prefill.url in str(explained)
    assert sum(part.duration_ns for part in explained.parts) == explained.total_ns
    steps = pair.journey("last")
    assert steps[0].type == "RouterPaired" and steps[0].holds["decode"] == servers.decode.url
