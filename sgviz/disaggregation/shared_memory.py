"""Segments in /dev/shm: made by the prefill side, mapped by the decode side, and never left behind.

A name holds the process that made it (its number, when it began, in which namespace), so that the next start removes
what a killed one left. Mappings end when nothing looks at them any more. Simplified: Linux only. Imports: errors.
"""

from __future__ import annotations

import mmap
import os
import uuid
from contextlib import suppress
from pathlib import Path

from sgviz.errors import SgvizError

FOLDER = Path("/dev/shm")
PREFIX = "sgviz-kv-"
MAPPED = (
    mmap.MAP_SHARED | mmap.MAP_POPULATE
)  # all pages at once, not one after another in the first transfers
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of the running kernel; empty where it does not tell."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def new_name() -> str:
    pid = os.getpid()
    return f"{PREFIX}{pid}-{_started(pid)}-{_namespace()}-{uuid.uuid4().hex[:12]}"


def create(size: int) -> tuple[str, memoryview]:
    """A new segment of `size` bytes: its name and its memory. Raises SgvizError if there is no room for it."""
    name = new_name()
    try:
        return name, _map(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, size)
    except OSError as error:
        with suppress(OSError):  # the folder may be what is missing
            unlink(name)
        raise SgvizError(f"{FOLDER} has no {size} bytes for the transfer of KV: {error}") from error


def attach(name: str) -> memoryview:
    """The memory of another process's segment. Raises SgvizError if there is none."""
    if not name.startswith(PREFIX) or "/" in name:
        raise SgvizError(f"{name!r} is no segment of KV")
    try:
        return _map(name, os.O_RDWR)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise SgvizError(f"the segment {name} cannot be opened: {error}") from error


def _map(name: str, flags: int, size: int = 0) -> memoryview:
    """Open the file and map it; `size`: of a new one. Raises OSError, and ValueError for an empty file."""
    descriptor = os.open(FOLDER / name, flags, 0o600)
    try:
        if size:  # claimed now: a page that is missing later would end the process
            os.posix_fallocate(descriptor, 0, size)
        return memoryview(mmap.mmap(descriptor, size, flags=MAPPED))
    finally:
        os.close(descriptor)


def unlink(name: str) -> None:
    """Take the name away; whoever has mapped it keeps the memory."""
    (FOLDER / name).unlink(missing_ok=True)


def write_token(token: str) -> str:
    """Leave a file that tells another process whether it sees this memory; its name. Raises SgvizError."""
    name = new_name()
    try:
        descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError as error:
        with suppress(OSError):
            unlink(name)
        raise SgvizError(f"{FOLDER} takes no file: {error}") from error
    return name


def same_memory(boot: str, name: str, token: str) -> bool:
    """Whether the process that wrote the token sees the same /dev/shm as this one."""
    if not boot or boot != boot_id() or not name.startswith(PREFIX) or "/" in name:
        return False
    try:
        return (FOLDER / name).read_text() == token
    except OSError:
        return False


def sweep() -> int:
    """Remove what processes left that are gone; how many files there were.

    Only of processes whose numbers mean something here: of another container that shares the memory nothing is known.
    """
    removed = 0
    for path in FOLDER.glob(f"{PREFIX}*"):
        pid, started, namespace, *_ = [*path.name.removeprefix(PREFIX).split("-"), "", ""]
        if pid.isdigit() and namespace == _namespace() and _started(int(pid)) != started:
            with suppress(OSError):  # gone already, or another user's
                path.unlink()
                removed += 1
    return removed


def _namespace() -> str:
    """In which process numbers are counted."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _started(pid: int) -> str:
    """When the process began, in ticks since the machine did; "0" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "0"
