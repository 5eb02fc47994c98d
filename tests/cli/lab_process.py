"""`sgviz lab` with a profile of its own, and JupyterLab's own HTTP interface."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from demo_process import PATIENCE_S, Started

TOKEN = "only-for-this-test"


def own_folders(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A clean profile: all that JupyterLab and its kernels keep lies under `folder`."""
    for name in ("RUNTIME_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(folder / name))
    monkeypatch.setenv("JUPYTER_TOKEN", TOKEN)
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))


class Client:
    """JupyterLab's own HTTP interface."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            content = answer.read()
        return json.loads(content) if path.startswith("/api") else content.decode()

    def wait_until_up(self, started: Started) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.ask("/api")
                return
            except (urllib.error.URLError, ConnectionError):
                assert started.process.poll() is None and time.monotonic() < deadline, started.err.read_text()
                time.sleep(0.2)


def kernels(process: Started) -> list[psutil.Process]:
    """Those of its children that are kernels; it also asks short-lived programs what is installed."""
    found = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            if "ipykernel_launcher" in child.cmdline():
                found.append(child)
    return found
