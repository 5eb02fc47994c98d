"""The HTTP port, and the folder where the sockets between processes live. Imports: channel, doctor.check."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sgviz.channel import PortArgs
from sgviz.doctor.check import Check, State

TOPIC = "network"
_OURS = re.compile(r"[0-9a-f]{12}-(scheduler|detokenizer|tokenizer|events)")
_LISTEN = "0A"


def checks(port: int, host: str = "127.0.0.1") -> Iterator[Check]:
    """The port, a socket in the temporary folder, and what dead engines left there."""
    yield _port(host, port)
    yield _sockets()
    yield _stale(Path(tempfile.gettempdir()))


def _port(host: str, port: int) -> Check:
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            found = f"taken by {owner}" if (owner := port_owner(port)) else f"not to be had: {error.strerror}"
            advice = "Start with --port and another number, or 0 for a free one."
            return Check(topic=TOPIC, name=name, found=found, state=State.WARN, advice=advice)
    return Check(topic=TOPIC, name=name, found=f"free on {host}")


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """`name (pid 12)` of a process that listens on the port, as far as the kernel lets this user see."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    for folder in proc.glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if any(os.readlink(link) in inodes for link in (folder / "fd").iterdir()):
                return f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return None


def _listening(port: int, proc: Path) -> Iterator[str]:
    """Inodes of the TCP sockets that listen on the port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _sockets() -> Check:
    """Makes the folder an engine would make, binds the longest name in it, then removes both."""
    try:
        ports, folder = PortArgs.for_processes()
        with folder as path, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(ports.detokenizer_ipc_name.removeprefix("ipc://"))
    except OSError as error:
        advice = "Set TMPDIR to a short folder you can write to; processes talk through sockets in it."
        found = f"no socket in {tempfile.gettempdir()}: {error}"
        return Check(topic=TOPIC, name="sockets", found=found, state=State.BAD, advice=advice)
    return Check(topic=TOPIC, name="sockets", found=f"can be made in {Path(path).parent}")


def _stale(folder: Path) -> Check:
    left = stale_folders(folder)
    if not left:
        return Check(topic=TOPIC, name="left-over sockets", found="none")
    advice = f"Engines died there; remove them with rm -r {' '.join(map(str, left))}."
    found = f"{len(left)} folder{'s' if len(left) > 1 else ''}"
    return Check(topic=TOPIC, name="left-over sockets", found=found, state=State.WARN, advice=advice)


def stale_folders(folder: Path) -> list[Path]:
    """Socket folders in which nobody listens any more; one with anything else in it is not ours."""
    return [path for path in sorted(folder.glob("sgviz-*")) if _is_stale(path)]


def _is_stale(folder: Path) -> bool:
    try:
        files = list(folder.iterdir())
        ours = all(_OURS.fullmatch(file.name) and stat.S_ISSOCK(file.stat().st_mode) for file in files)
    except OSError:
        return False
    return bool(files) and ours and not any(_answers(file) for file in files)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # no right to ask, or busy: somebody is there
            return True
    return True
