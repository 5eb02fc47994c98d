"""Threads and processes: the same tokens, the same kinds of events; and a recording that survives a crash."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from server_process import ServerProcess

import sgviz
from sgviz.engine import Engine, Mode
from sgviz.recording import Recording

pytestmark = pytest.mark.slow
PROMPTS = ["one prompt", "one prompt and more", "something else", "a much longer prompt " * 6]
GREEDY = {"temperature": 0, "max_new_tokens": 40}


def run(mode: Mode, loop: str) -> tuple[list[list[int]], Recording]:
    """Prompts one after the other (so that timing decides nothing), twice, on a pool small enough to evict."""
    settings = {"max_total_tokens": 256, "chunked_prefill_size": 32, "page_size": 4, "torch_threads": 1}
    with Engine("tiny-llama", mode=mode, event_loop=loop, **settings) as engine:
        outputs = [engine.generate(prompt, GREEDY)["output_ids"] for _ in range(2) for prompt in PROMPTS]
        reply = engine.chat("hello", max_tokens=4, temperature=0)
        recording = engine.recording()
        deadline = time.monotonic() + 3
        while mode == "processes" and time.monotonic() < deadline:
            kinds = set(recording.events_of(reply.rid)["kind"])
            if {"text.emitted", "output.streamed", "response.finished"} <= kinds:
                break
            time.sleep(0.02)
        frozen = recording.freeze()
    return outputs, frozen


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_threads_and_processes_agree(loop: str) -> None:
    (threads, in_threads), (processes, in_processes) = run("threads", loop), run("processes", loop)
    assert threads == processes
    # an idle turn may or may not fall between two requests: everything else must be there in both
    kinds = [set(rec.events["kind"]) - {"loop.idle"} for rec in (in_threads, in_processes)]
    assert kinds[0] == kinds[1]
    for recording in (in_threads, in_processes):
        assert recording.check() == []
        assert recording.events["t_ns"].is_monotonic_increasing
        assert recording.dropped == 0
    pids = in_processes.events.query("kind == 'process.started'")["detail"].str.extract(r"pid=(\d+)")[0]
    assert pids.nunique() == 3


def test_a_recording_is_readable_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "crash.sgv"
    with ServerProcess("--record", str(path)) as server:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        request = urllib.request.Request(
            f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            output = json.loads(answer.read())
        time.sleep(1.0)  # events are written every 0.2 s
        server.signal(signal.SIGKILL)
        server.wait()
    recording = sgviz.load(path)
    rid = output["meta_info"]["id"]
    assert recording.request(rid).stats.finished
    assert recording.header.settings["model_path"] == "tiny-llama"
    assert sum(stage.duration_ns for stage in recording.stages(rid)) > 0
    assert recording.check() == []
