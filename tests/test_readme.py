"""The README is true: what it lists exists, what it names can be called, what it prints runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from sgviz.__main__ import COMMANDS
from sgviz.cli.options import options
from sgviz.engine import Engine
from sgviz.recording import load_pair

sys.path.insert(0, str(Path(__file__).parent / "launch"))
sys.path.insert(0, str(Path(__file__).parent / "router"))
from pair_processes import RouterProcess
from server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVED = "http://127.0.0.1:30000"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
MAX_PICTURE_BYTES = 200_000


def tree() -> dict[str, str]:
    """Listed path -> what it is for; folders end in a slash."""
    block = next(block for block in README.split("```") if "\nREADME.md " in block)
    found, above = {}, ""
    for line in block.strip().splitlines():
        name, _, meaning = line.strip().partition(" ")
        path = above + name if line.startswith("  ") else name
        above = above if line.startswith("  ") else name
        found[path] = meaning.strip()
    return found


# ---------------------------------------------------------------- what it lists


def test_every_listed_path_exists_and_says_what_it_is_for() -> None:
    for path, meaning in tree().items():
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path
        assert meaning, path


def test_every_folder_is_listed() -> None:
    def listed(folder: Path, prefix: str) -> set[str]:
        inside = [path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.*"))]
        hidden = (".", "__", "build", "dist")
        return {f"{prefix}{path.name}/" for path in inside if not path.name.startswith(hidden)}

    top = {path for path in listed(ROOT, "") if not path.endswith(".egg-info/")}
    assert (top | listed(ROOT / "sgviz", "sgviz/")) - set(tree()) - {"runs/"} == set()


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    }
    assert len(links) > 4
    for link in links:
        path, _, anchor = link.partition("#")
        assert not path or (ROOT / path).exists(), link
        assert not anchor or anchor in headings, link


def test_the_picture_is_small() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    for name in pictures:
        content = (ROOT / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < MAX_PICTURE_BYTES, name


def test_commands_and_flags_exist() -> None:
    named = set(re.findall(r"`?sgviz (\w+)", "\n".join(re.findall(r"`([^`]+)`", README) + SHELL)))
    assert named <= set(COMMANDS)
    written = "".join(path.read_text() for path in (ROOT / "sgviz/cli").glob("*.py"))
    known = {option.flag for option in options()} | set(re.findall(r'"(--[\w-]+)"', written))
    assert set(re.findall(r"`(--[a-z][\w-]+)", README)) <= known


# ---------------------------------------------------------------- what it prints


def run(program: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def engine_programs() -> list[str]:
    return [program for program in PROGRAMS if "sgviz.Engine(" in program]


@pytest.mark.slow
@pytest.mark.parametrize("program", engine_programs(), ids=range(len(engine_programs())))
def test_programs_with_an_engine_run(program: str, tmp_path: Path) -> None:
    said = run(program, tmp_path)
    assert "cached_tokens" in said and list(tmp_path.glob("*.sgv"))
    if "capital of France" in program:
        assert (
            said.startswith("The capital of France is Paris.\n") and "SSE chunk" not in said.splitlines()[0]
        )


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(model="smollm2-135m-instruct") as running:
        yield running


@pytest.mark.slow
def test_programs_with_a_server_run(server: ServerProcess, tmp_path: Path) -> None:
    client, watcher = [program.replace(SERVED, server.url) for program in PROGRAMS if SERVED in program]
    assert "Paris" in run(client, tmp_path)
    watched = run(watcher, tmp_path)
    assert "cached_tokens" in watched and "In order (ms since its arrival)" in watched


@pytest.mark.slow
def test_shell_commands_with_a_server_run(server: ServerProcess) -> None:
    commands = [block.replace(SERVED, server.url) for block in SHELL if SERVED in block]
    assert len(commands) == 3
    for command in commands:
        if shutil.which(command.split()[0]) is None and not command.startswith("sgviz"):
            continue
        runnable = command.replace("sgviz ", f"{sys.executable} -m sgviz ")
        done = subprocess.run(
            ["bash", "-c", runnable], input="What is the capital of France?\n", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if "bench" in command:
            assert re.search(r"Successful requests: +8\b", done.stdout)
            continue
        # the chat draws its answers, so they differ
        assert "smollm2-135m-instruct" in done.stdout and ("Paris" in done.stdout or "chat" in command)


@pytest.mark.slow
def test_the_prefill_decode_pair_serves_and_its_recordings_read_as_one(tmp_path: Path) -> None:
    """The page's three commands, with the quick device and free ports; then what it says of the recordings."""
    (block,) = [block for block in SHELL if "sgviz router" in block]
    prefill, decode, router = (shlex.split(line)[2:] for line in block.strip().splitlines())
    mock = ("--device", "mock", "--disaggregation-bootstrap-port", "0")
    with ExitStack() as stack:
        sides = [
            stack.enter_context(ServerProcess(*_elsewhere(flags, tmp_path), *mock, wait=False))
            for flags in (prefill, decode)
        ]
        urls = {f"http://127.0.0.1:{port}": side for port, side in zip((8101, 8102), sides, strict=True)}
        for side in sides:
            side.wait_ready()
        flags = [urls[flag].url if flag in urls else flag for flag in router]
        front = stack.enter_context(RouterProcess(*_elsewhere(flags, tmp_path)))
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none")
        answer = client.completions.create(model="tiny-llama", prompt="What is", max_tokens=8)
        assert answer.usage is not None and answer.usage.completion_tokens == 8
    paired = load_pair(*(tmp_path / name for name in ("p.sgv", "d.sgv", "r.sgv")))
    (rid,) = paired.rids
    assert paired.audit().balanced and "transfer" in str(paired.explain(rid))


def _elsewhere(flags: list[str], folder: Path) -> list[str]:
    """With recordings in that folder, and without the port."""
    named = [str(folder / flag) if flag.endswith(".sgv") else flag for flag in flags]
    port = named.index("--port") if "--port" in named else None
    return named if port is None else named[:port] + named[port + 2 :]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings that the page speaks of: a small engine's, and those of its comparison."""
    folder = tmp_path_factory.mktemp("readme")
    with Engine("tiny-llama", device="mock", mock_step_ms=20, max_running_requests=4) as engine:
        engine.generate(
            [f"question {number}" for number in range(10)], {"max_new_tokens": 24, "ignore_eos": True}
        )
        engine.recording().save(folder / "ten.sgv")
    (program,) = [program for program in PROGRAMS if "experiment.compare" in program]
    (folder / "said.txt").write_text(run(program, folder))
    return folder


@pytest.mark.slow
def test_the_comparison_shows_what_the_page_says(recorded: Path) -> None:
    seconds = re.search(
        r"^duration.*? +([\d.]+) +([\d.]+)$", (recorded / "said.txt").read_text(), re.MULTILINE
    )
    assert seconds is not None and float(seconds[2]) < 0.5 * float(seconds[1])
    assert "SIMULATED" in (recorded / "said.txt").read_text()


@pytest.mark.slow
def test_commands_on_recordings_run(recorded: Path) -> None:
    commands = [
        line.partition("#")[0].strip()
        for block in SHELL
        if ".sgv" in block and "sgviz serve" not in block
        for line in block.splitlines()
    ]
    assert {command.split()[1] for command in commands} == {"explain", "report", "export", "diff"}
    said = ""
    for command in commands:
        words = [sys.executable, "-m", *command.split()]
        done = subprocess.run(words, cwd=recorded, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    assert "running_slots" in said and "the first decision that differs" in said and "observing cost" in said
    assert (recorded / "ten.html").exists() and (recorded / "ten.pftrace").exists()
