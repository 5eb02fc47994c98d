"""What an engine must not leave behind: threads, child processes, sockets' folders, open ports, the switch interval."""

from __future__ import annotations

import glob
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

import psutil

PATIENCE_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    threads: frozenset[str]
    children: frozenset[int]
    folders: frozenset[str]
    listening: frozenset[int]
    files: int
    switch_interval: float


def snapshot() -> Snapshot:
    me = psutil.Process()
    return Snapshot(
        threads=frozenset(f"{t.name}-{t.ident}" for t in threading.enumerate()),
        children=frozenset(child.pid for child in me.children(recursive=True)),
        folders=frozenset(glob.glob(os.path.join(tempfile.gettempdir(), "sgviz-*"))),
        listening=frozenset(
            c.laddr.port for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN
        ),
        files=me.num_fds(),
        switch_interval=sys.getswitchinterval(),
    )


def assert_nothing_left(before: Snapshot, *, more_files: int = 0) -> None:
    """Everything that exists now existed before; patient, since the kernel closes some things a little later."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = snapshot()
        left = {
            "threads": now.threads - before.threads,
            "children": now.children - before.children,
            "folders": now.folders - before.folders,
            "ports": now.listening - before.listening,
            "files": max(0, now.files - before.files - more_files),
            "switch interval": now.switch_interval != before.switch_interval,
        }
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"left behind: { {k: v for k, v in left.items() if v} }"
        time.sleep(0.05)
