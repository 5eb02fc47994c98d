"""A served engine under load, and a headless Chromium to look at its page."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgviz.engine import Engine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
COLOURS = """(canvas) => { const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data[i] << 16 |
  data[i + 1] << 8 | data[i + 2]);
  return seen.size; }"""
# everything that was drawn belongs to one event number: read in one go
SHOWN = """() => { const root = document.getElementById("sgviz"); const found = { seq: Number(root.dataset.seq) };
  for (const each of root.querySelectorAll("b[data-n]")) found[each.dataset.n] = each.textContent; return found; }"""


class Load:
    """Clients that ask again and again until `stop`."""

    def __init__(self, engine: Engine, clients: int) -> None:
        self._engine, self._stopping = engine, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        turn = number
        while not self._stopping.is_set():
            prompt = ("You are a patient teacher. " if turn % 3 else "") + f"{turn}: why? " * (1 + turn % 5)
            self._engine.generate(prompt, sampling_params={"max_new_tokens": 8 + turn % 24})
            turn += len(self._threads)

    def give_up(self) -> None:
        """Ask no more; who waits for an answer is left alone."""
        self._stopping.set()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)


@contextmanager
def loaded(engine: Engine, clients: int) -> Iterator[Load]:
    load = Load(engine, clients)
    try:
        yield load
    except BaseException:
        load.give_up()  # the scheduler may stand still for good: what went wrong is to be told, not that
        raise
    load.stop()


def state(url: str, seq: int, key: str | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/sgviz/state?seq={seq}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))
