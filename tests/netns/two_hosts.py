"""Two hosts on one machine: network namespaces joined by a virtual cable, each with an address of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

ASK = """
import json, sys, httpx
method, url, body, headers = json.loads(sys.argv[1])
with httpx.stream(method, url, json=body, headers=headers, timeout=120) as answer:
    print(answer.status_code, flush=True)
    for line in answer.iter_lines():
        print(line, flush=True)
"""


class Ask:
    """A request from inside a host. `status` is there once `wait_line` or `end` returned."""

    def __init__(
        self, prefix: Sequence[str], method: str, url: str, body: Any, headers: dict[str, str]
    ) -> None:
        words = json.dumps([method, url, body, headers])
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", ASK, words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._said = threading.Condition()
        self._lines: list[str] = []
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._said:
                self._lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._over = True
            self._said.notify_all()

    def wait_lines(self, count: int, timeout: float = 60.0) -> None:
        """Until so many lines of the answer, the status one of them, have come."""
        with self._said:
            assert self._said.wait_for(lambda: self._over or len(self._lines) >= count, timeout)

    def end(self, timeout: float = 60.0) -> tuple[int, str]:
        """Status and body once it is over; 0 and what was raised if there was no answer."""
        with self._said:
            over = self._said.wait_for(lambda: self._over, timeout)
        if not over:
            self.close()
            raise AssertionError(f"no end within {timeout:g} s, after {self._lines[:3]}")
        status = int(self._lines[0]) if self._lines and self._lines[0].isdigit() else 0
        self.close()
        return status, "\n".join(self._lines[1:] if status else self._lines)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(frozen=True)
class Host:
    """One of the two. `prefix`: what runs a command there."""

    name: str
    address: str
    device: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def ask(self, method: str, url: str, body: Any = None, **headers: str) -> Ask:
        """Send a request from here, and return at once."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Ask(self.prefix, method, url, body, named)

    def get(self, url: str) -> tuple[int, str]:
        return self.ask("GET", url).end()

    def post(self, url: str, body: Any) -> tuple[int, Any]:
        status, text = self.ask("POST", url, body).end()
        return status, json.loads(text)

    def cut(self) -> None:
        """Pull the cable here."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self.device, "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def forbidden() -> str:
    """Why this machine lets nobody make network namespaces; empty if it does."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "network namespaces are made with Linux's `ip`, which is not here"
    name = f"sgv-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this machine forbids network namespaces: {made.stderr.strip()}"
    run = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True)
    cable = ("ip", "-n", name, "link", "add", "sgvtry", "type", "veth", "peer", "name", "sgvtry2")
    joined = subprocess.run(cable, capture_output=True, text=True)
    _ip("netns", "del", name)
    failed = next((done for done in (run, joined) if done.returncode), None)
    return f"this machine forbids namespaces that are joined: {failed.stderr.strip()}" if failed else ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, joined; gone afterwards, with all that is in them."""
    if why := forbidden():
        pytest.skip(why)
    tag = uuid.uuid4().hex[:6]
    hosts = [Host(f"sgv-{tag}-{n}", f"10.213.7.{n + 1}", f"sgv{tag}{n}") for n in range(2)]
    first, second = hosts
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)  # the cable goes with its end
        cable = ("type", "veth", "peer", "name", second.device, "netns", second.name)
        _ip("link", "add", first.device, "netns", first.name, *cable)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            for device in ("lo", host.device):
                _ip("-n", host.name, "link", "set", device, "up")
        yield first, second
