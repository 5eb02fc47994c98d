"""A component that is stopped (SIGSTOP), not dead: health says so and names it, and a stop is not held up by it."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request

import psutil
import pytest
from server_process import Background, ServerProcess, gone

from sgviz.messages.generate import MAX_TOKEN_CHARS
from sgviz.model.fetch import resolve_model
from sgviz.model.model_config import model_facts

pytestmark = pytest.mark.slow

MOCK = ("--device", "mock", "--mock-step-ms", "10", "--health-timeout", "1")
LONG = {"input_ids": [7] * 5, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
SHORT = {"input_ids": [7] * 5, "sampling_params": {"max_new_tokens": 3}}
COMPONENTS = ("scheduler", "detokenizer")


def get(server: ServerProcess, path: str, body: dict | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("component", COMPONENTS)
def test_health_and_server_info_name_the_one_that_is_stopped(component: str, busy: bool) -> None:
    with ServerProcess(*MOCK) as server:
        load = Background(lambda: get(server, "/generate", LONG)) if busy else None
        assert get(server, "/health")[0] == 200
        child = server.children()[component]
        stop(child)
        get(server, "/health")  # what was under way may still count as a sign of life
        for path in ("/health", "/health_generate", "/server_info"):
            status, said = get(server, path)
            assert status == 503, said
            assert f"the {component} did not" in said or f"from the {component} within 1 s" in said
        assert get(server, "/ready")[0] == 200
        child.send_signal(signal.SIGCONT)
        if load is not None:
            load.join(60)
            assert load.error is None and load.result[0] == 200  # late, and whole
        assert get(server, "/health")[0] == 200 and get(server, "/server_info")[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_stop_is_not_held_up_and_the_exit_code_says_that_one_was_killed(component: str, busy: bool) -> None:
    with ServerProcess(*MOCK, "--shutdown-grace", "2") as server:
        children = server.children()
        load = Background(lambda: get(server, "/generate", LONG)) if busy else None
        time.sleep(0.3)
        stop(children[component])
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 1  # the grace, and seconds in which others work too
        assert f"the {component} process" in server.text() and "did not leave by itself" in server.text()
        assert gone(list(children.values())) and server.leftovers() == []
        if load is not None:
            load.join(10)
            assert load.error is not None or load.result[0] == 503


def test_long_prompts_at_the_tokenizer_do_not_hold_up_a_stop() -> None:
    """Each is just short enough to be tokenized, and all of them are work for minutes."""
    longest = model_facts(resolve_model("tiny-llama")).context_len * MAX_TOKEN_CHARS
    text = {"text": "word " * (longest // 5), "sampling_params": {"max_new_tokens": 1}}
    with ServerProcess(*MOCK, "--shutdown-grace", "1") as server:
        children = list(server.children().values())
        loads = [Background(lambda: get(server, "/generate", text)) for _ in range(80)]
        deadline = time.monotonic() + 200
        while (
            json.loads(get(server, "/server_info")[1])["internal_states"][0]["num_tokenizer_manager_reqs"]
            < 60
        ):
            assert time.monotonic() < deadline
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert gone(children) and server.leftovers() == []
        for load in loads:
            load.join(10)
        # some were tokenized, and are too long; the others were let go
        ended = [load.result[0] if load.error is None else None for load in loads]
        assert set(ended) <= {400, 503, None} and sum(status != 400 for status in ended) > 40


def test_requests_that_take_too_long_end_though_the_engine_is_stopped() -> None:
    with ServerProcess(*MOCK, "--request-timeout", "1") as server:
        assert get(server, "/generate", SHORT)[0] == 200
        status, said = get(server, "/generate", LONG)
        assert status == 503 and "request_timeout" in said
        child = server.children()["detokenizer"]
        stop(child)
        status, said = get(server, "/generate", SHORT)
        assert status == 503 and "request_timeout" in said
        child.send_signal(signal.SIGCONT)
        assert get(server, "/generate", SHORT)[0] == 200
        state = json.loads(get(server, "/server_info")[1])["internal_states"][0]
        assert (state["num_live_reqs"], state["num_tokenizer_manager_reqs"], state["private_tokens"]) == (
            0,
            0,
            0,
        )
