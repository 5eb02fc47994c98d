"""A prefill server, a decode server and a router as real processes, for tests that talk to them and kill them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
from server_process import ServerProcess

COMMON = ("--device", "cpu", "--dtype", "float32", "--torch-threads", "1", "--max-total-tokens", "2048")
QUICK = ("--disaggregation-heartbeat-interval", "0.5")


class RouterProcess:
    """`sgviz router --json`; ready when it is made, ended with the block."""

    def __init__(self, *flags: str, prefix: Sequence[str] = ()) -> None:
        """`prefix`: what runs the command."""
        command = [
            *prefix,
            sys.executable,
            "-m",
            "sgviz",
            "router",
            "--port",
            "0",
            "--json",
            "--health-interval",
            "0.2",
        ]
        self.process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"exit {self.process.wait()}"
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["url"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status after that signal."""
        self.process.send_signal(number)
        return self.process.wait(15.0)

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            assert self.process.poll() == 0 or self.stop() == 0
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def side(mode: str, *flags: str) -> ServerProcess:
    """A server of that mode, not awaited."""
    port = ("--disaggregation-bootstrap-port", "0") if mode == "prefill" else ()
    return ServerProcess("--disaggregation-mode", mode, *port, *COMMON, *QUICK, *flags, wait=False)


@contextmanager
def pair(*flags: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Both servers, ready."""
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(side(mode, *flags)) for mode in ("prefill", "decode"))
        prefill.wait_ready()
        decode.wait_ready()
        yield prefill, decode
