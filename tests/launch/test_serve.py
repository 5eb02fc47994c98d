"""`sgviz serve` from outside: the openai client, signals, dying children, bad starts, abandoned answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest
from server_process import Background, ServerProcess, gone

pytestmark = pytest.mark.slow
LONG = {"temperature": 0, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


def client(server: ServerProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    with ServerProcess() as running:
        yield running


def ask(server: ServerProcess, **more: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": "Say something."}]
    return client(server).chat.completions.create(model="tiny-llama", messages=messages, **more)


def state(server: ServerProcess) -> dict:
    with urllib.request.urlopen(f"{server.url}/server_info") as answer:
        return json.loads(answer.read())["internal_states"][0]


def test_chat_streamed_and_not_is_the_same(server: ServerProcess) -> None:
    whole = ask(server, temperature=0, max_tokens=24)
    stream = ask(server, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completions_streamed_and_not_are_the_same(server: ServerProcess) -> None:
    args = {"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    whole = client(server).completions.create(**args)
    chunks = list(client(server).completions.create(**args, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.usage.completion_tokens <= 20


def test_stop_and_seed(server: ServerProcess) -> None:
    whole = (
        ask(server, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}).choices[0].message.content
    )
    stop = next(char for char in whole[3:] if char.isascii() and char.isprintable())
    cut = ask(server, temperature=0, max_tokens=40, stop=[stop], extra_body={"ignore_eos": True})
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    seeded = [
        ask(server, temperature=1.0, max_tokens=16, seed=seed).choices[0].message.content
        for seed in (5, 5, 6)
    ]
    assert seeded[0] == seeded[1] != seeded[2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"temperature": 9e99, "top_p": 2}, openai.BadRequestError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError),
        ({"extra_body": {"regex": "[z-a]"}}, openai.BadRequestError),
        ({"model": "gpt-4o"}, openai.NotFoundError),
    ],
)
def test_the_client_gets_its_own_exceptions(
    server: ServerProcess, arguments: dict[str, object], error: type[Exception]
) -> None:
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "x"}], **arguments}
    for stream in (False, True):
        with pytest.raises(error):
            client(server).chat.completions.create(**body, stream=stream)


def test_keys() -> None:
    with ServerProcess("--api-key", "sesame", "--admin-api-key", "root") as server:
        with pytest.raises(openai.AuthenticationError):
            client(server, "wrong").models.list()
        assert client(server, "sesame").models.list().data[0].id == "tiny-llama"
        with pytest.raises(urllib.error.HTTPError, match=r"401|403"):
            _post(server, "/flush_cache", "sesame")
        assert _post(server, "/flush_cache", "root") == 200
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200


def _post(server: ServerProcess, path: str, key: str) -> int:
    request = urllib.request.Request(
        server.url + path, method="POST", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request) as answer:
        return answer.status


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_work_within_half_a_second(
    server: ServerProcess, stream: bool
) -> None:
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1900,
            "ignore_eos": True, "temperature": 0, "stream": stream}  # fmt: skip
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + payload)
        deadline = time.monotonic() + 10
        while state(server)["num_live_reqs"] == 0:
            assert time.monotonic() < deadline
    left = time.monotonic()
    while state(server)["num_live_reqs"]:
        assert time.monotonic() - left < 0.5
    now = state(server)
    assert now["protected_tokens"] == now["private_tokens"] == 0


def test_idle_components_sleep(server: ServerProcess) -> None:
    """Counted in wake-ups, which a slow machine has no more of: one that polls every millisecond has a thousand."""
    processes = [psutil.Process(server.process.pid), *server.children().values()]
    time.sleep(1.0)
    before = [(sum(process.cpu_times()[:2]), wake_ups(process.pid)) for process in processes]
    time.sleep(4.0)
    for process, (cpu, woken) in zip(processes, before, strict=True):
        assert (wake_ups(process.pid) - woken) / 4.0 < 50, process
        assert (sum(process.cpu_times()[:2]) - cpu) / 4.0 < 0.2, process  # one that never sleeps has 1


def wake_ups(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    return sum(
        int(line.split()[1])
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def test_a_port_in_use_is_an_error_within_seconds(server: ServerProcess) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "sgviz", "serve", "--model-path", "tiny-llama", "--port", str(server.port)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (
        done.returncode not in (0, None)
        and str(server.port) in done.stderr
        and "Traceback" not in done.stderr
    )
    assert time.monotonic() - started < 10


def test_a_model_that_fails_to_load_is_an_error_and_leaves_nothing(tmp_path: object) -> None:
    broken = f"{tmp_path}/broken"
    os.makedirs(broken)
    for name in ("config.json", "tokenizer.json"):
        with open(f"{broken}/{name}", "w") as file:
            file.write("{}")
    with ServerProcess(model=broken, wait=False) as server:
        assert server.wait(30) != 0
        assert "Traceback" not in server.text() and "broken" in server.text()
        assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(number: int) -> None:
    with ServerProcess("--device", "mock", "--mock-step-ms", "10") as server:
        children = list(server.children().values())
        assert len(children) == 2
        running = Background(
            lambda: ask(server, temperature=0, max_tokens=150, extra_body={"ignore_eos": True})
        )
        deadline = time.monotonic() + 10
        while state(server)["num_live_reqs"] == 0:
            assert time.monotonic() < deadline
        server.signal(number)
        time.sleep(0.3)
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
            ask(server, max_tokens=3)
        assert server.wait() == 0
        running.join(5)
        assert running.error is None and running.result.usage.completion_tokens == 150
        assert gone(children) and server.leftovers() == []


@pytest.mark.parametrize("component", ["scheduler", "detokenizer"])
def test_kill_9_of_a_component_ends_every_stream_with_an_error(component: str) -> None:
    with ServerProcess("--device", "mock", "--mock-step-ms", "20") as server:
        children = server.children()
        streams = [Background(lambda: list(ask(server, stream=True, **LONG))) for _ in range(10)]
        deadline = time.monotonic() + 10
        while state(server)["num_live_reqs"] < 10:
            assert time.monotonic() < deadline
        time.sleep(0.2)
        children[component].kill()
        killed = time.monotonic()
        for stream in streams:
            stream.join(5)
            assert isinstance(stream.error, openai.APIError), stream.error or stream.result
            assert component in str(stream.error)
        assert time.monotonic() - killed < 3.0
        assert server.wait() != 0
        assert gone(list(children.values())) and server.leftovers() == []


def test_kill_9_of_the_parent_leaves_no_children() -> None:
    with ServerProcess() as server:
        children = list(server.children().values())
        server.signal(signal.SIGKILL)
        server.wait()
        assert gone(children)


def test_ctrl_c_while_starting_leaves_nothing() -> None:
    with ServerProcess(wait=False) as server:
        children = server.wait_for_children(2)
        assert "ready" not in server.text()
        server.signal(signal.SIGINT)
        assert server.wait() == 130
        assert gone(children) and server.leftovers() == []
        assert "Traceback" not in server.text()
