"""The debugger across processes: a served engine parked with streams open, keys, clients that die, the raw endpoint."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from debug_tools import TIGHT, Load, eventually, of_scheduler

import sgviz
from sgviz.debugger import connect_debugger
from sgviz.engine import Engine
from sgviz.errors import BadRequest, NotFound, Unauthorized, Unavailable

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
from server_process import ServerProcess

STREAMS = 20
PATH = "/sgviz/debug"


def stream(url: str, number: int, key: str | None = None) -> list[int]:
    """One streamed /generate over HTTP; the output ids at its end."""
    body = {
        "text": f"request {number} " * (1 + number % 5),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 40 + number},
    }
    headers = {"authorization": f"Bearer {key}"} if key else {}
    ids: list[int] = []
    with httpx2.stream("POST", f"{url}/generate", json=body, headers=headers, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line.removeprefix("data: "))["output_ids"]
    return ids


class Streams:
    """Many of them at once."""

    def __init__(self, url: str, count: int = STREAMS, key: str | None = None) -> None:
        self.ids: dict[int, list[int]] = {}

        def one(number: int) -> None:
            self.ids[number] = stream(url, number, key)

        self._threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> dict[int, list[int]]:
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "streams hang"
        return self.ids


@pytest.fixture(scope="module")
def url(engine: Engine) -> str:
    return engine.serve(port=0).url


def ask(url: str, expect: int = 200, **body: object) -> dict:
    response = httpx2.post(url + PATH, json=body, timeout=60)
    assert response.status_code == expect, response.text
    return response.json()


def test_the_raw_endpoint_speaks_plain_json(url: str, engine: Engine) -> None:
    assert ask(url, session="me", op="attach", lease_s=5)["status"]["attached"] is True
    number = ask(url, session="me", op="add_breakpoint", text="planned and batch.size >= 1")["number"]
    load = Load(engine, count=3)
    status = ask(url, session="me", op="wait", timeout_s=20)["status"]
    assert status["parked"] and status["where"]["event"][4][0] == "batch.planned"
    assert [point["number"] for point in status["breakpoints"]] == [number]
    view = ask(url, session="me", op="look", what=["waiting", "pools", "tree"])["view"]
    assert view["pools"]["total"] == 256 and view["running"] is None
    assert all(len(base64.b64decode(node["token_ids"])) == 4 * node["tokens"] for node in view["tree"])
    ask(url, session="me", op="detach")
    load.join()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"op": "attach"}, "session"),
        ({"session": "", "op": "attach"}, "session"),
        ({"session": "x"}, "op"),
        ({"session": "x", "op": "fly"}, "fly"),
        ({"session": "x", "op": "attach", "lease_s": -1}, "lease_s"),
        ({"session": "x", "op": "attach", "surprise": 1}, "surprise"),
        ({"session": "x", "op": "look", "what": ["everything"]}, "everything"),
        ({"session": "x", "op": "resume", "until": "x" * 3000}, "2000"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_a_400_that_names_what_is_wrong(url: str, body: dict, says: str) -> None:
    assert says in ask(url, 400, **body)["error"]["message"]


def test_a_stranger_commands_nothing(url: str, engine: Engine) -> None:
    with connect_debugger(url) as debugger:
        debugger.pause()
        assert "not attached" in ask(url, 404, session="stranger", op="resume")["error"]["message"]
        assert "another debugger" in ask(url, 503, session="stranger", op="attach")["error"]["message"]
        ask(url, session="stranger", op="detach")
        assert debugger.parked


def test_a_connection_gives_the_debugger_and_its_past(url: str, engine: Engine) -> None:
    with sgviz.connect(url) as recording, recording.debugger() as debugger:
        debugger.breakpoints.add("refused")
        load = Load(engine)
        where = debugger.wait()
        moment = debugger.back("iteration")
        assert moment.iteration < where.iteration and moment == recording.at(count=moment.count)
        debugger.breakpoints.clear()
        debugger.continue_()
        load.join()


def test_only_the_text_form_travels(url: str) -> None:
    with connect_debugger(url) as debugger:
        with pytest.raises(BadRequest, match="works in mode='threads' only"):
            debugger.breakpoints.add(lambda event: True)
        with pytest.raises(BadRequest, match="works in mode='threads' only"):
            debugger.run(lambda event: True)
        named = ask(url, 400, session=debugger._session, op="add_breakpoint", local="os.system")
        assert "no Python predicate" in named["error"]["message"]
        with pytest.raises(BadRequest, match="column 13: unknown name 'resaon' \\(did you mean 'reason'"):
            debugger.breakpoints.add('refused and resaon == "kv"')


def test_the_endpoint_exists_only_where_it_was_asked_for() -> None:
    with Engine("tiny-llama", **TIGHT) as engine:
        url = engine.serve(port=0).url
        assert httpx2.post(url + PATH, json={"session": "x", "op": "attach"}).status_code == 404
        with pytest.raises(NotFound, match="start the server with --enable-debugger"):
            connect_debugger(url)
    with pytest.raises(Unavailable, match="cannot be reached"):
        connect_debugger(url)


@pytest.mark.parametrize(
    "keys", [{"api_key": "k"}, {"api_key": "k", "admin_api_key": "a"}, {"admin_api_key": "a"}]
)
def test_it_takes_the_admin_key_if_there_is_one_else_the_api_key(keys: dict[str, str]) -> None:
    right = keys.get("admin_api_key", keys.get("api_key"))
    with Engine("tiny-llama", enable_debugger=True, **TIGHT, **keys) as engine:
        url = engine.serve(port=0).url
        for wrong in {None, "k", "a", "x"} - {right}:
            with pytest.raises(Unauthorized, match="key is needed"):
                connect_debugger(url, wrong)
        with connect_debugger(url, right) as debugger:
            assert debugger.pause().stop


@pytest.mark.parametrize("parked_s", [3.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_open_streams_wait_and_end_with_the_same_tokens(url: str, engine: Engine, parked_s: float) -> None:
    plain = Streams(url).join()
    assert len(plain) == STREAMS
    with connect_debugger(url) as debugger:
        number = debugger.breakpoints.add("processed and iteration > 0")
        streams = Streams(url)
        debugger.wait()
        debugger.breakpoints.remove(number)
        eventually(lambda: len(engine.pipeline.manager.rid_to_state) == STREAMS)
        parked_at = of_scheduler(engine)[-1]
        time.sleep(parked_s)
        assert of_scheduler(engine)[-1] == parked_at and streams.ids == {}
        assert httpx2.get(f"{url}/health").status_code == 200
        assert httpx2.get(f"{url}/server_info").json()["internal_states"][0]["parked"] is True
        debugger.continue_()
        assert streams.join() == plain


@pytest.mark.slow
def test_a_server_in_processes_survives_a_client_that_is_killed_while_it_is_parked() -> None:
    flags = ["--enable-debugger", "--admin-api-key", "a", "--device", "mock", "--max-total-tokens", "1024"]
    with ServerProcess(*flags, "--watchdog-timeout", "2") as server:
        plain = Streams(server.url).join()
        code = (
            "import sys, time; from sgviz.debugger import connect_debugger\n"
            f"debugger = connect_debugger({server.url!r}, 'a', lease_s=4)\n"
            "debugger.breakpoints.add('processed and iteration > 0')\n"
            "print('attached', flush=True); print(debugger.wait().kind, flush=True); time.sleep(60)\n"
        )
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None and client.stdout.readline() == "attached\n"
        streams = Streams(server.url)
        assert client.stdout.readline() == "batch.processed\n"
        time.sleep(5.0)  # longer than lease and watchdog: while the client lives, it stays parked
        assert streams.ids == {} and server.process.poll() is None
        client.send_signal(signal.SIGKILL)
        client.wait()
        assert streams.join() == plain
        with connect_debugger(server.url, "a") as debugger:
            where = debugger.pause()
            assert where.stop and debugger.pools.total == 1024
            server.signal(signal.SIGTERM)  # a parked server still ends in order
            assert server.wait() == 0
