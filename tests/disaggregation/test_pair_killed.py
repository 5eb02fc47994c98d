"""Both servers of a pair and a router as real processes: one side is killed in the midst of all, and comes back.

At the moment of the kill one request decodes (after its transfer), one is being sent (during), others wait (before).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from pair_processes import RouterProcess
from server_process import Background, ServerProcess, gone

import sgviz

pytestmark = pytest.mark.slow

HEARTBEAT_S = 0.4
SILENCE_S = 2.5 * HEARTBEAT_S
PATIENCE_S = 15.0  # for a busy machine
CHUNK = 16
COMMON = ("--device", "mock")
FLAGS = {
    "prefill": ("--mock-step-ms", "400", "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "2048"),
    "decode": ("--mock-step-ms", "20", "--max-total-tokens", "4096"),
}
Json = dict[str, Any]


class Servers:
    """The pair and its router; `kill` and `restart` a side, on the ports that it had."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, dict[str, Path]()
        self.pids: set[int] = set()
        self.ports: dict[str, tuple[str, ...]] = {
            "prefill": ("--disaggregation-bootstrap-port", "0"),
            "decode": (),
        }
        self.all: dict[str, ServerProcess] = {}
        self.router: RouterProcess
        self._room = 0

    def start(self) -> None:
        for mode in FLAGS:
            self.all[mode] = self._start(mode)
        for mode, server in self.all.items():
            server.wait_ready()
            self.ports[mode] = ("--port", str(server.port))
        info = httpx.get(f"{self.all['prefill'].url}/server_info", timeout=30).json()
        self.bootstrap = info["disaggregation_bootstrap_port"]
        self.ports["prefill"] += ("--disaggregation-bootstrap-port", str(self.bootstrap))
        self.router = RouterProcess(
            "--prefill", self.all["prefill"].url, "--decode", self.all["decode"].url, "--retries", "0"
        )

    def _start(self, mode: str) -> ServerProcess:
        flags = ("--disaggregation-heartbeat-interval", str(HEARTBEAT_S), "--disaggregation-mode", mode)
        self.files[mode] = self.folder / f"{mode}-{time.monotonic_ns()}.sgv"
        record = ("--record", str(self.files[mode]))
        return ServerProcess(*COMMON, *flags, *FLAGS[mode], *self.ports[mode], *record, wait=False)

    def _name(self, mode: str) -> list[psutil.Process]:
        """Its children, whose numbers are kept."""
        found = list(self.all[mode].children().values())
        self.pids |= {child.pid for child in found}
        return found

    def kill(self, mode: str) -> None:
        """All its processes at once, as if the machine were gone."""
        children = self._name(mode)
        os.killpg(self.all[mode].process.pid, signal.SIGKILL)
        for child in children:
            if child.is_running():
                child.kill()
        self.all[mode].wait()
        assert gone(children)

    def restart(self, mode: str) -> None:
        self.all[mode].__exit__(None, None, None)
        self.all[mode] = self._start(mode)
        self.all[mode].wait_ready()

    def state(self, mode: str) -> Json:
        info: Json = httpx.get(f"{self.all[mode].url}/server_info", timeout=30).json()
        return dict(info["internal_states"][0])

    def until(self, mode: str, **wanted: int) -> None:
        """Until these of its numbers are as large, or exactly 0."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            state = self.state(mode)
            if all(state[name] >= least if least else not state[name] for name, least in wanted.items()):
                return
            assert time.monotonic() < deadline, (mode, wanted, state)
            time.sleep(0.02)

    def holds_nothing(self, mode: str) -> bool:
        state = self.state(mode)
        free = state["available_tokens"] + state["evictable_tokens"]
        return state["num_live_reqs"] == 0 and free == state["max_total_num_tokens"]

    def both(self, rid: str, ids: list[int], tokens: int) -> dict[str, Background]:
        """Ask both sides themselves."""
        self._room += 1
        body = asked(rid, ids, tokens) | {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap, "bootstrap_room": self._room,
        }  # fmt: skip
        return {mode: Background(lambda url=server.url: post(url, body)) for mode, server in self.all.items()}

    def close(self) -> None:
        """Whatever of it has begun."""
        with ExitStack() as stack:
            for each in (*self.all.values(), getattr(self, "router", None)):
                if each is not None:
                    stack.push(each)

    def shut_down(self) -> None:
        """Both, as a user would."""
        for mode, server in self.all.items():
            self._name(mode)
            server.signal(signal.SIGTERM)
            assert server.wait(30) == 0 and server.leftovers() == []


def asked(rid: str, ids: list[int], tokens: int) -> Json:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"rid": rid, "input_ids": ids, "sampling_params": params}


def post(url: str, body: Json) -> tuple[int, Json, float]:
    """Status, answer, and when it came."""
    answer = httpx.post(f"{url}/generate", json=body, timeout=60)
    return answer.status_code, answer.json(), time.monotonic()


class Stream:
    """An answer through the router, as it comes."""

    def __init__(self, servers: Servers, rid: str, ids: list[int], tokens: int) -> None:
        self.parts: list[Json] = []
        self._url, self._body = servers.router.url, {**asked(rid, ids, tokens), "stream": True}
        self.reader = Background(self._read)

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/generate", json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self.parts.append(json.loads(line[6:]))

    def begin(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.parts) < 3:
            assert time.monotonic() < deadline and self.reader.error is None
            time.sleep(0.02)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("recordings"))
    try:
        made.start()
        yield made
    finally:
        made.close()


def result(call: Background) -> tuple[int, Json, float]:
    call.join(60)
    assert call.error is None and call.result is not None, call.error
    return call.result  # type: ignore[return-value]


def goes_on(servers: Servers, rid: str) -> None:
    """The next request through the router, when it has seen that the server is back."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := post(servers.router.url, asked(rid, [5] * CHUNK, 4)))[0] == 503:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    assert answer[0] == 200 and len(answer[1]["output_ids"]) == 4
    for mode in FLAGS:
        servers.until(mode, num_live_reqs=0)
        assert servers.holds_nothing(mode)


def at_work(servers: Servers, name: str) -> tuple[Stream, dict[str, Background], dict[str, Background]]:
    """One that decodes, one that is being sent, one that waits for its prefill."""
    after = Stream(servers, f"{name}-after", [7] * CHUNK, 500)
    after.begin()
    during = servers.both(f"{name}-during", [*range(20, 20 + 10 * CHUNK)], 5)
    servers.until("prefill", num_chunked_reqs=1)
    before = servers.both(f"{name}-before", [*range(60, 60 + 10 * CHUNK)], 5)
    servers.until("prefill", num_waiting_reqs=1)
    servers.until("decode", decode_transfer_queue_reqs=2)
    return after, during, before


def test_prefill_is_killed(servers: Servers) -> None:
    """Who has its KV goes on, the others end after the time of silence, the client of the router at once."""
    after, during, before = at_work(servers, "p")
    routed = Background(lambda: post(servers.router.url, asked("p-routed", [9] * CHUNK, 5)))
    servers.until("prefill", num_waiting_reqs=2)
    servers.kill("prefill")
    killed = time.monotonic()
    status, answer, when = result(routed)
    assert status == 503 and "broke off before it answered" in answer["error"]["message"]
    assert when - killed < 2.0 + PATIENCE_S  # the router waits 2 s for a decode side that may have all
    for calls in (during, before):
        status, answer, when = result(calls["decode"])
        assert status == 503 and "silent for" in answer["error"]["message"], answer
        assert when - killed < SILENCE_S + PATIENCE_S
    after.reader.join(60)
    assert after.reader.error is None and len(after.parts[-1]["output_ids"]) == 500
    servers.until("decode", num_live_reqs=0)
    assert servers.holds_nothing("decode")
    servers.restart("prefill")
    goes_on(servers, "p-next")


def test_decode_is_killed(servers: Servers) -> None:
    """The prefill side gives all back after the time of silence; the client's stream ends with an error."""
    after, during, before = at_work(servers, "d")
    servers.kill("decode")
    killed = time.monotonic()
    for calls in (during, before):
        status, answer, when = result(calls["prefill"])
        assert status == 503 and "silent for" in answer["error"]["message"], answer
        assert when - killed < SILENCE_S + PATIENCE_S
    after.reader.join(60)
    assert 0 < len(after.parts[-2]["output_ids"]) < 500
    assert "broke off in the middle" in after.parts[-1]["error"]["message"]
    servers.until("prefill", num_live_reqs=0)
    assert servers.holds_nothing("prefill")
    servers.restart("decode")
    goes_on(servers, "d-next")


def test_a_request_that_meets_nobody_is_ended_when_its_client_leaves(servers: Servers) -> None:
    """The other side never got it: nothing is held for it, on either side."""
    body = asked("alone", [8] * CHUNK, 4) | {
        "bootstrap_host": "127.0.0.1", "bootstrap_port": servers.bootstrap, "bootstrap_room": 10**6,
    }  # fmt: skip
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{servers.all['decode'].url}/generate", json=body, timeout=1.0)
    servers.until("decode", num_live_reqs=0)
    assert servers.holds_nothing("decode")
    status, answer, _ = post(servers.all["prefill"].url, body)  # it hears that the other side has left
    assert status == 500 and "the decode side ended it" in answer["error"]["message"]
    goes_on(servers, "alone-next")


def test_what_the_prefill_server_cannot_take_is_its_error_at_once(servers: Servers) -> None:
    """Refused before its scheduler sees it, so the decode side is told by the router."""
    begun = time.monotonic()
    status, answer, when = post(servers.router.url, asked("long", [6] * 3000, 4))
    assert status == 400 and "3000 tokens" in answer["error"]["message"], answer
    assert when - begun < PATIENCE_S
    servers.until("decode", num_live_reqs=0)
    goes_on(servers, "long-next")


def test_the_books_of_the_survivors_balance(servers: Servers) -> None:
    """The last test: it ends the servers."""
    servers.shut_down()
    reports = [sgviz.load(path).audit() for path in servers.files.values()]
    assert [str(report) for report in reports if not report.balanced] == []
    left = [path.name.split("-")[2] for path in Path("/dev/shm").glob("sgviz-kv-*")]
    assert not servers.pids & {int(pid) for pid in left}, "what was killed left memory, and nobody swept it"
