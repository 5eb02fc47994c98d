"""Servers beside each other on one host, and what dead ones left: nobody gets another's tokens, no start is blocked."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Background, ServerProcess, gone

from sgviz.channel import PortArgs
from sgviz.doctor.network import stale_folders
from sgviz.engine import Engine

pytestmark = pytest.mark.slow


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets below a long path would go elsewhere."""
    with tempfile.TemporaryDirectory(prefix="stale-") as path:
        yield Path(path)


def generate(server: ServerProcess, text: str, tokens: int = 12) -> dict:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    data = json.dumps({"text": text, "rid": f"same-{text}", "sampling_params": params}).encode()
    request = urllib.request.Request(f"{server.url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_two_servers_at_once_answer_as_each_does_alone() -> None:
    """The same rids at the same time on two models: each client gets its own model's tokens and no others."""
    texts = [f"prompt {number}" for number in range(20)]
    with ServerProcess() as a, ServerProcess(model="tiny-qwen2") as b:
        alone = {server.url: [generate(server, text)["output_ids"] for text in texts] for server in (a, b)}
        assert alone[a.url] != alone[b.url]
        calls = {
            server.url: [Background(lambda s=server, t=text: generate(s, t)["output_ids"]) for text in texts]
            for server in (a, b)
        }
        for url, waiting in calls.items():
            for call in waiting:
                call.join(60)
            assert [call.result for call in waiting] == alone[url], [call.error for call in waiting]
        # one of them leaves and the other does not notice
        a.signal(signal.SIGTERM)
        assert a.wait() == 0
        assert generate(b, texts[0])["output_ids"] == alone[b.url][0]


def test_what_killed_servers_left_blocks_nobody_and_is_not_touched() -> None:
    with ServerProcess() as dead:
        children = list(dead.children().values())
        dead.signal(signal.SIGKILL)
        dead.wait()
        assert gone(children)
        (left,) = dead.leftovers()
        files = sorted(os.listdir(left))
        assert stale_folders(Path(dead.folder.name)) == [Path(left)] and len(files) == 4
        # a server whose sockets lie beside the dead one's
        with ServerProcess(folder=dead.folder.name) as server:
            assert generate(server, "alive")["meta_info"]["completion_tokens"] == 12
            assert len(server.leftovers()) == 2
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert dead.leftovers() == [left] and sorted(os.listdir(left)) == files


def test_stale_folders_of_every_kind_do_not_disturb_a_start(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    ports, folder = PortArgs.for_processes()
    for name in (ports.scheduler_input_ipc_name, ports.tokenizer_ipc_name):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(name.removeprefix("ipc://"))
    (short_path / "sgviz-file").write_text("not even a folder")
    (short_path / "sgviz-locked").mkdir(mode=0)
    with Engine("tiny-llama", mode="processes", device="mock") as engine:
        assert engine.generate("x", {"max_new_tokens": 3})["meta_info"]["completion_tokens"] == 3
        assert engine.pipeline.ports.instance_id != ports.instance_id
    assert sorted(path.name for path in short_path.glob("sgviz-*")) == sorted(
        ["sgviz-file", "sgviz-locked", Path(folder.name).name]
    )
    folder.cleanup()
