"""What becomes of the engine when a component hangs at its start, raises in its loop, or never comes round again.

The faults come from policies of a user, which run inside the scheduler's loop, and from signals.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from raising_policy import RAISING
from server_process import Background, ServerProcess, gone

from sgviz.engine import Engine
from sgviz.errors import StartupError, Unavailable
from sgviz.launch.messages import ExitCode
from sgviz.launch.processes import describe_exit
from sgviz.serving.context import ServerState

ENDLESS = """
import os, time
class Policy:
    name = "endless"
    def order(self, waiting, view):
        while any(len(req.origin_input_ids) == 66 for req in waiting) and os.path.exists(__file__):
            time.sleep(0.01)
        return waiting
"""
FATAL = {"input_ids": [5] * 66, "sampling_params": {"max_new_tokens": 3}}
LONG = {"input_ids": [7] * 5, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
MOCK = ("--device", "mock", "--mock-step-ms", "10")


@pytest.fixture
def policy(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    file = tmp_path / "fatal_policy.py"
    file.write_text(request.param)
    return f"{file}:Policy"


def post(server: ServerProcess, body: dict) -> tuple[int, str]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/generate", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_exit_codes_have_names() -> None:
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(1) == "exit code 1" and describe_exit(77) == "exit code 77"
    assert describe_exit(ExitCode.STUCK) == "exit code 4, ended by its watchdog"
    assert describe_exit(ExitCode.PARENT_GONE) == "exit code 3, its parent had gone"


def starting_children(server: ServerProcess) -> list[psutil.Process]:
    """Scheduler and detokenizer, as soon as both run Python of their own."""
    parent = psutil.Process(server.process.pid)
    deadline = time.monotonic() + 60
    while True:
        found = [child for child in parent.children() if "sgviz.launch.child" in " ".join(child.cmdline())]
        if len(found) == 2:
            return sorted(found, key=lambda child: child.pid)
        assert time.monotonic() < deadline and server.process.poll() is None


CASES = [
    pytest.param(RAISING, [], "exit code 1: Catastrophe: the loop cannot go on", id="raises"),
    pytest.param(
        ENDLESS, ["--watchdog-timeout", "0.5"], "exit code 4, ended by its watchdog: no progress", id="stuck"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "flags", "cause"), CASES, indirect=["policy"])
def test_in_processes_every_waiter_gets_503_with_the_cause_and_nothing_is_left(
    policy: str, flags: list[str], cause: str
) -> None:
    with ServerProcess(*MOCK, *flags, "--schedule-policy", policy) as server:
        children = list(server.children().values())
        whole = Background(lambda: post(server, LONG))
        stream = Background(lambda: post(server, {**LONG, "stream": True}))
        time.sleep(0.5)
        status, body = post(server, FATAL)
        assert status == 503 and cause in json.loads(body)["error"]["message"]
        for waiter in (whole, stream):
            waiter.join(10)
            assert waiter.error is None
        assert whole.result[0] == 503 and cause in whole.result[1]
        last = stream.result[1].strip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503 and cause in last
        assert server.wait() == 1
        assert gone(children) and server.leftovers() == []
        # the log says where it happened
        assert "fatal_policy.py" in server.text() and "in order" in server.text()


@pytest.mark.parametrize(
    ("policy", "settings", "cause"),
    [
        pytest.param(RAISING, {}, "Catastrophe: the loop cannot go on", id="raises"),
        pytest.param(ENDLESS, {"watchdog_timeout": 0.5}, "no progress for 0.5 s", id="stuck"),
    ],
    indirect=["policy"],
)
def test_in_threads_every_waiter_gets_the_cause_and_health_is_bad(
    policy: str, settings: dict, cause: str, tmp_path: Path
) -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=5.0, schedule_policy=policy, **settings) as engine:
        url = engine.serve(port=0).url
        stream = Background(lambda: list(engine.stream_sync(**_call(LONG))))
        time.sleep(0.2)
        with pytest.raises(Unavailable, match=cause):
            engine.generate(**_call(FATAL))
        stream.join(10)
        assert isinstance(stream.error, Unavailable) and cause in str(stream.error)
        assert engine.pipeline.status.state is ServerState.UNHEALTHY
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health", timeout=10)
        with pytest.raises(Unavailable, match=cause):
            engine.generate("afterwards", {"max_new_tokens": 1})
        # a thread cannot be ended from outside; the endless policy goes on as long as its file is there
        (tmp_path / "fatal_policy.py").unlink()


def _call(body: dict) -> dict:
    return {"input_ids": body["input_ids"], "sampling_params": body["sampling_params"]}


@pytest.mark.slow
def test_a_forward_that_takes_too_long_ends_the_server() -> None:
    with ServerProcess(
        "--device", "mock", "--mock-step-ms", "60000", "--watchdog-timeout", "1", "--skip-server-warmup"
    ) as server:
        children = list(server.children().values())
        status, body = post(server, FATAL)
        assert status == 503 and "no progress for 1 s" in body
        assert server.wait() == 1 and gone(children) and server.leftovers() == []
        assert "thread MainThread" in server.text()


@pytest.mark.slow
def test_a_warm_up_that_hangs_is_a_failed_start() -> None:
    flags = ("--device", "mock", "--mock-step-ms", "60000", "--watchdog-timeout", "1")
    with ServerProcess(*flags, wait=False) as server:
        assert server.wait(60) == 1
        assert "the warm-up request failed" in server.text() and "no progress for 1 s" in server.text()
        assert "Traceback" not in server.text() and server.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_child_that_hangs_at_its_start_is_an_error_in_time(which: int) -> None:
    with ServerProcess(*MOCK, "--startup-timeout", "12", wait=False) as server:
        children = starting_children(server)
        children[which].send_signal(signal.SIGSTOP)
        assert server.wait(60) == 1
        component = ("scheduler", "detokenizer")[which]
        assert (
            f"the {component} process (pid {children[which].pid}) did not get ready within 12 s"
            in server.text()
        )
        assert "startup_timeout" in server.text() and "Traceback" not in server.text()
        assert gone(children) and server.leftovers() == []


@pytest.mark.slow
def test_a_child_killed_at_its_start_is_told_at_once_although_the_other_still_loads() -> None:
    with ServerProcess("--startup-timeout", "60", wait=False) as server:
        children = starting_children(server)
        children[0].send_signal(signal.SIGSTOP)  # the scheduler would be waited for
        children[1].kill()
        assert server.wait(30) == 1
        assert "the detokenizer process died while starting (signal SIGKILL)" in server.text()
        assert gone(children) and server.leftovers() == []


@pytest.mark.slow
def test_a_policy_that_cannot_be_loaded_stops_the_server_before_it_starts() -> None:
    with ServerProcess("--schedule-policy", "nowhere.py:Policy", wait=False) as server:
        assert server.wait(30) == 1
        assert "schedule_policy nowhere.py:Policy: there is no file" in server.text()
        assert "Traceback" not in server.text()


SLOW_TO_MAKE = """
import time
class Policy:
    name = "slow to make"
    def __init__(self): time.sleep(1.0)
    def order(self, waiting, view): return waiting
"""


@pytest.mark.parametrize("policy", [SLOW_TO_MAKE], indirect=True, ids=["slow"])
def test_a_slow_start_in_threads_is_an_error_too(policy: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(StartupError, match=r"did not get ready within 0.2 s \(startup_timeout\)"):
        Engine("tiny-llama", device="mock", startup_timeout=0.2, schedule_policy=policy)
    assert set(threading.enumerate()) <= before
