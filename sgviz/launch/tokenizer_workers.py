"""The tokenizer workers of one engine, seen from the main process: started together, watched, ended together.

Imports: launch.processes, launch.tokenizer_router, serving (the port).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from sgviz.config import Settings
from sgviz.launch.ending import end_processes
from sgviz.launch.messages import BootMessage, InitInfo, WorkerBoot
from sgviz.launch.processes import ChildProcess, OnDeath, wait_ready
from sgviz.launch.tokenizer_router import MultiTokenizerRouter

STEP_S = 0.02


class TokenizerWorkers:
    """All in the engine's loop, but for the watching threads."""

    def __init__(
        self, settings: Settings, router: MultiTokenizerRouter, tokenizer_dir: Path, model_dir: Path
    ) -> None:
        self._settings, self._router = settings, router
        self._tokenizer_dir, self._model_dir = tokenizer_dir, model_dir
        self.children: list[ChildProcess] = []

    async def start(
        self, listeners: Sequence[socket.socket], main_path: str, scheduler: InitInfo, on_death: OnDeath
    ) -> dict[str, InitInfo]:
        """One worker for each bound socket, which it inherits; what each told when it was ready, by component.

        Raises:
            StartupError: one could not start; none is left.
        """
        try:
            for number, listener in enumerate(listeners, 1):
                self._start_one(number, listener, main_path, scheduler)
            timeout = self._settings.serve.startup_timeout
            infos = await asyncio.to_thread(wait_ready, self.children, timeout)
        except BaseException:
            end_processes(self.children, 0.0)
            raise
        finally:
            for listener in listeners:
                listener.close()  # a worker that dies must take its connections with it
        for child in self.children:
            child.watch(on_death)
        return infos

    def _start_one(self, number: int, listener: socket.socket, main_path: str, scheduler: InitInfo) -> None:
        boot = BootMessage(
            component=f"http-{number}",
            settings=self._settings,
            ports=self._router.open(number),
            tokenizer_dir=str(self._tokenizer_dir),
            worker=WorkerBoot(
                number=number,
                listener_fd=listener.fileno(),
                main_path=main_path,
                scheduler=scheduler,
                model_dir=str(self._model_dir),
            ),
        )
        self.children.append(ChildProcess(boot, (listener.fileno(),)))

    async def leave(self, patience: float) -> None:
        """Let all close their ports and end; `patience` seconds for all together."""
        self._router.leave()
        deadline = time.monotonic() + patience
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while time.monotonic() < deadline and any(not child.wait(0.0) for child in self.children):
                    await asyncio.sleep(STEP_S)
