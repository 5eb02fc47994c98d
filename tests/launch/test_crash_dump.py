"""`crash_dump_folder`: what a dying engine leaves is a recording that loads, and the requests that were under way."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from raising_policy import RAISING
from server_process import Background, ServerProcess

import sgviz
from sgviz.engine import Engine
from sgviz.errors import StartupError, Unavailable
from sgviz.events import RingSink
from sgviz.events.schema import EngineConfigured
from sgviz.launch import crash_dump
from sgviz.launch.crash_dump import CrashDump
from sgviz.recording import Header

LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def dump_in(folder: Path) -> tuple[sgviz.Recording, dict[str, Any]]:
    """The one dump in the folder."""
    (recording,), (told,) = folder.glob("*.sgv"), folder.glob("*.json")
    assert recording.stem == told.stem and recording.stem.startswith("sgviz-crash-")
    return sgviz.load(recording), json.loads(told.read_text())


def check(folder: Path, cause: str) -> None:
    rec, told = dump_in(folder)
    assert cause in told["why"] and told["settings"]["device"] == "mock"
    live = {each["rid"]: each for each in told["live"]}
    assert live["long"]["completion_tokens"] > 0 and live["long"]["prompt_tokens"] == 5
    assert live["long"]["sampling_params"]["max_new_tokens"] == 1500
    assert len(live["long"]["output_ids"]) == live["long"]["completion_tokens"]
    assert {"long", "done"} <= set(rec.rids) and "done" not in live
    assert isinstance(rec.header.configured, EngineConfigured) and not rec.header.settings["api_key"]
    assert rec.request("done").finish_reason == "length"
    assert len(rec.events) > 10 and rec.explain("done")


def test_a_thread_that_dies_leaves_a_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy, folder = tmp_path / "fatal_policy.py", tmp_path / "new" / "dumps"
    policy.write_text(RAISING)
    engine = Engine(
        "tiny-llama", device="mock", mock_step_ms=2.0, schedule_policy=f"{policy}:Policy",
        crash_dump_folder=str(folder),
    )  # fmt: skip
    with engine:
        engine.generate(input_ids=[5] * 7, sampling_params={"max_new_tokens": 3}, rid="done")
        stream = engine.stream_sync(input_ids=[7] * 5, sampling_params=LONG, rid="long")
        next(stream)
        with pytest.raises(Unavailable, match="Catastrophe"):
            engine.generate(input_ids=[5] * 66, sampling_params={"max_new_tokens": 3}, rid="fatal")
    check(folder, "Catastrophe: the loop cannot go on")
    assert str(next(folder.glob("*.json")).with_suffix("")) in caplog.text


def test_an_orderly_end_leaves_none(tmp_path: Path) -> None:
    with Engine("tiny-llama", device="mock", crash_dump_folder=str(tmp_path)) as engine:
        engine.generate("x", {"max_new_tokens": 2})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_found_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StartupError, match="crash_dump_folder"):
        Engine("tiny-llama", device="mock", crash_dump_folder=str(file / "below"))


def test_a_dump_is_bounded_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgviz.events import Tracer
    from sgviz.events.schema import RequestDispatched

    class Clock:
        at = 0

        def now(self) -> int:
            return self.at

    clock = Clock()
    ring = RingSink()
    trace = Tracer("scheduler", ring, clock)
    for minute in range(20):
        clock.at = minute * 60_000_000_000
        for _ in range(10):
            trace.emit(RequestDispatched(rid="a"))
    monkeypatch.setattr(crash_dump, "SETTLE_S", 0.0)
    for most, kept in ((1000, 60), (25, 25)):
        monkeypatch.setattr(crash_dump, "MOST_EVENTS", most)
        folder = tmp_path / str(most)
        dump = CrashDump(str(folder), ring, lambda dropped: Header(dropped=dropped))
        dump.start("why", [])
        dump.start("a second death", [])
        dump.join()
        rec, told = dump_in(folder)
        assert (len(rec), rec.header.dropped, told["why"]) == (kept, 200 - kept, "why")


def test_a_disk_that_is_full_is_an_error_in_the_log_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash_dump, "write", full)
    monkeypatch.setattr(crash_dump, "SETTLE_S", 0.0)
    dump = CrashDump(str(tmp_path), RingSink(), lambda dropped: Header())
    dump.start("why", [])
    dump.join()
    assert "could not be written" in caplog.text and "No space left" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("component", ["scheduler", "detokenizer"])
def test_kill_9_of_a_component_leaves_a_dump_and_the_log_says_where(tmp_path: Path, component: str) -> None:
    import httpx

    with ServerProcess(
        "--device", "mock", "--mock-step-ms", "10", "--crash-dump-folder", str(tmp_path)
    ) as server:

        def ask(rid: str, **params: Any) -> httpx.Response:
            body = {"rid": rid, "input_ids": [7] * 5, "sampling_params": params}
            return httpx.post(f"{server.url}/generate", json=body, timeout=60)

        assert ask("done", max_new_tokens=3).status_code == 200
        running = Background(lambda: ask("long", **LONG))
        time.sleep(1.5)  # more than the interval in which unstreamed requests tell how far they are
        server.children()[component].kill()
        assert server.wait() == 1
        running.join(5)
        assert running.result.status_code == 503
        found = re.search(r"crash dump: (\S+\.sgv)", server.text())
        assert found and Path(found[1]).exists()
    check(tmp_path, f"the {component} died (signal SIGKILL)")
