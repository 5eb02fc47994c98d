"""`sgviz demo` as a user runs it: what it prints and writes, how it refuses, what Ctrl-C leaves."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo_process import Started, run, socket_folders

import sgviz
from sgviz.config import DEFAULT_MODEL
from sgviz.recording import Recording

pytestmark = pytest.mark.slow
TYPES = [
    "ChatCompletionRequest",
    "GenerateReqInput",
    "TokenizedGenerateReqInput",
    "Req",
    "ScheduleBatch",
    "GenerationBatchResult",
    "BatchTokenIDOutput",
    "BatchStrOutput",
    "SSE chunk",
]
COMPONENTS = ["http"] * 2 + ["tokenizer_manager"] + ["scheduler"] * 4 + ["detokenizer", "http"]
PROMPT = "What is the capital of France?"
MAX_TOKENS = 24


@dataclass
class Demo:
    """A finished `sgviz demo --json`."""

    model: str
    out: Path
    stdout: str
    stderr: str
    json: dict[str, Any]
    recording: Recording


@pytest.fixture(scope="module", params=["tiny-llama", "smollm2-135m-instruct"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("demo")
    out = folder / "made" / "by the demo"
    arguments = ("--json", "--model", request.param, "--out", str(out), "--max-tokens", str(MAX_TOKENS))
    begin = time.monotonic()
    done = run("demo", *arguments, folder=folder)
    print(f"sgviz demo --model {request.param}: {time.monotonic() - begin:.1f} s")
    assert done.returncode == 0, done.stderr
    assert socket_folders(folder) == []
    found = json.loads(done.stdout)
    yield Demo(request.param, out, done.stdout, done.stderr, found, sgviz.load(out / "run.sgv"))


# ---------------------------------------------------------------- what it says


def test_standard_output_is_one_object_and_nothing_else(demo: Demo) -> None:
    assert demo.stdout.count("\n") == 1 and demo.stdout.endswith("}\n")
    assert {"reply", "types", "stages", "iterations", "recording", "figure"} <= demo.json.keys()
    assert demo.json["dropped_events"] == 0 and "Traceback" not in demo.stderr


def test_the_nine_types_come_in_order_from_three_processes(demo: Demo) -> None:
    steps = demo.json["types"]
    assert [step["type"] for step in steps] == TYPES
    assert [step["component"] for step in steps] == COMPONENTS
    times = [step["t_ms"] for step in steps]
    assert times[0] == 0 and times == sorted(times) and len(set(times)) == len(times)
    process = {step["component"]: step["pid"] for step in steps}
    assert process["http"] == process["tokenizer_manager"]
    assert len(set(process.values())) == 3 and all(process.values())
    assert all(step["holds"] for step in steps)


def test_the_stages_add_up_to_the_time_on_the_wire(demo: Demo) -> None:
    """Against the stamps of the first and last event, not against the sum that the demo might have made."""
    stages = demo.json["stages"]
    total = sum(stage["duration_ms"] for stage in stages)
    assert total == pytest.approx(demo.json["total_ms"], abs=1e-6)
    row = demo.recording.requests.set_index("rid").loc[demo.json["rid"]]
    assert demo.json["e2e_ms"] == pytest.approx(row.e2e_ms) and demo.json["total_ms"] == pytest.approx(
        row.total_ms
    )
    events = demo.recording.events_of(demo.json["rid"]).set_index("kind").t_ms
    assert total == pytest.approx(events["response.finished"] - events["request.received"], abs=1e-5)
    ends = [stage["start_ms"] + stage["duration_ms"] for stage in stages]
    assert [stage["start_ms"] for stage in stages[1:]] == pytest.approx(ends[:-1], abs=1e-6)
    assert {"tokenize", "prefill_forward", "decode", "detokenize"} <= {stage["name"] for stage in stages}


def test_the_iterations_are_those_of_the_file(demo: Demo) -> None:
    rows, table = demo.json["iterations"], demo.recording.iterations
    assert len(rows) == len(table)
    for name in ("iteration", "bid", "mode", "batch_size", "new_tokens", "cached_tokens", "kv_used"):
        assert [row[name] for row in rows] == table[name].tolist()
    assert [row["mode"] for row in rows] == ["extend"] + ["decode"] * (len(rows) - 1)
    request = demo.recording.request(demo.json["rid"])
    assert rows[0]["new_tokens"] == request.prompt_tokens and request.completion_tokens == len(rows)
    assert [row["kv_used"] - rows[0]["kv_used"] for row in rows] == list(range(len(rows)))


def test_file_and_figure(demo: Demo) -> None:
    assert demo.json["recording"] == str(demo.out / "run.sgv")
    assert demo.recording.check() == [] and demo.recording.rids == [demo.json["rid"]]
    picture = Path(demo.json["figure"]).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert 1000 < width < 3000 and 500 < height < 3000 and len(picture) < 500_000
    assert sorted(path.name for path in demo.out.iterdir()) == ["run.png", "run.sgv"]


def test_the_reply_is_that_of_a_request_that_is_not_streamed(demo: Demo) -> None:
    with sgviz.Engine(demo.model, torch_threads=1) as engine:
        whole = engine.chat(PROMPT, max_tokens=MAX_TOKENS, temperature=0)
    assert demo.json["reply"] == whole.text != ""
    if demo.model == DEFAULT_MODEL:
        assert "Paris" in whole.text


def test_tables_for_people(tmp_path: Path) -> None:
    done = run(
        "demo", "--model", "tiny-llama", "--max-tokens", "12", "--out", str(tmp_path / "out"), folder=tmp_path
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    named = [" ".join(row[1:3]) if "SSE" in row else row[1] for row in rows if row[:1] and row[0].isdigit()]
    assert named[:9] == TYPES
    recording = sgviz.load(tmp_path / "out" / "run.sgv")
    shown = [row[:3] for row in rows if row[2:3] in (["extend"], ["decode"])]
    table = recording.iterations
    assert shown == [[str(row.iteration), str(row.bid), row["mode"]] for _, row in table.iterrows()]
    total = sum(stage.duration_ns for stage in recording.stages(recording.rids[0])) / 1e6
    assert ["end", "to", "end", f"{total:,.2f}", "100.0", "%"] in rows
    assert PROMPT in done.stdout and str(tmp_path / "out" / "run.png") in done.stdout
    assert not any(not char.isprintable() and char not in "\n\t" for char in done.stdout)


# ---------------------------------------------------------------- how it refuses


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "{file}/below"], "folder that can be written"),
        (["--out", "{file}"], "folder that can be written"),
        (["--model", "tiny-lama"], "did you mean 'tiny-llama'"),
        (["--model", "{file}"], "Hugging Face folder"),
        (["--jsn"], "did you mean '--json'"),
        (["--max-tokens", "0"], "at least 1"),
        (["--max-tokens", "many"], "at least 1"),
        (["and", "more"], "unrecognized arguments"),
        (["--model", "tiny-llama", "--max-tokens", "999999", "--out", "{folder}/out"], "context length"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_one_sentence_says_what_is_wrong(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    filled = [part.format(file=tmp_path / "file", folder=tmp_path) for part in arguments]
    done = run("demo", "--json", *filled, folder=tmp_path)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert sentence in done.stderr and "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("sgviz demo:")]
    assert len(said) == 1
    assert socket_folders(tmp_path) == []


# ---------------------------------------------------------------- Ctrl-C


@pytest.fixture
def long_demo(tmp_path: Path) -> Iterator[Started]:
    arguments = ("--model", "tiny-llama", "--max-tokens", "1900", "--out", str(tmp_path / "out"))
    started = Started("demo", *arguments, folder=tmp_path)
    yield started
    started.end()


def test_ctrl_c_in_generated_code_keeps_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text('exec("raise KeyboardInterrupt")')  # as in making a dataclass
    (tmp_path / "as_sgviz.py").write_text(
        "import sys, sgviz.__main__ as command\n"
        "command.COMMANDS['demo'] = ('interrupted', '')\n"
        "sys.exit(command.main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-m", "as_sgviz"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (130, "sgviz demo: interrupted")


def test_ctrl_c_while_it_imports_leaves_nothing(long_demo: Started) -> None:
    long_demo.wait_for_work(0.5)
    _assert_gone(long_demo)


@pytest.mark.parametrize("children", [1, 2])
def test_ctrl_c_during_the_start_leaves_nothing(long_demo: Started, children: int) -> None:
    long_demo.wait_for_children(children)
    _assert_gone(long_demo)


def test_ctrl_c_in_the_middle_of_the_answer_leaves_nothing(long_demo: Started) -> None:
    long_demo.wait_for_output("assistant  ", more=40)
    _assert_gone(long_demo)
    assert list((long_demo.folder / "out").iterdir()) == []


def _assert_gone(demo: Started) -> None:
    code, alive = demo.interrupt()
    assert code == 130 and alive == []
    assert demo.err.read_text().strip() == "sgviz demo: interrupted"
    assert socket_folders(demo.folder) == []
