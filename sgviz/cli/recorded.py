"""What the commands that read a recording share. Imports: recording, errors."""

from __future__ import annotations

import argparse
import os
import sys

from sgviz.cli.options import Parser
from sgviz.errors import BadRequest
from sgviz.recording import PairedRecording, Recording, load

MANY = 100_000  # fewer events are there at once


class _Shown:
    """Progress in one line of the terminal, for recordings that take a while."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, stage: str, done: int, of: int) -> None:
        words = f"{stage} {done / max(1, of):.0%} of {of:,} events"
        if of >= MANY and words != self._last:
            self._last = words
            print(f"\r{words}", end="\n" if done >= of else "", file=sys.stderr, flush=True)


def parser(name: str, description: str) -> Parser:
    return Parser(prog=f"sgviz {name}", description=description)


def add_run(made: argparse.ArgumentParser, name: str = "run", what: str = "a recording (.sgv)") -> None:
    made.add_argument(name, metavar=name.upper(), help=what)


def add_pair(made: argparse.ArgumentParser) -> None:
    """--prefill, --decode and --router: the recordings of a pair, in place of one."""
    for side in ("prefill", "decode", "router"):
        made.add_argument(
            f"--{side}", metavar="FILE", help=f"the {side}'s recording of a pair, in place of RUN"
        )


def check_target(run: str, target: str) -> None:
    """Raise BadRequest if writing `target` would overwrite the recording that is read."""
    if os.path.exists(target) and os.path.exists(run) and os.path.samefile(run, target):
        raise BadRequest(f"{target!r} is the recording itself; name another file")


def opened(path: str) -> Recording:
    """The recording; SgvizError with one sentence if it cannot be read. A cut tail is told on the way."""
    rec = load(path, _Shown() if sys.stderr.isatty() else None)
    if rec.truncated:
        print(
            f"{path}: the last {rec.truncated:,} bytes are no whole event and are left out", file=sys.stderr
        )
    return rec


def opened_pair(prefill: str | None, decode: str | None, router: str | None = None) -> PairedRecording:
    """Both recordings of a run (and the router's) as one.

    Raises:
        BadRequest: one side is missing, or they do not belong together. SgvizError: one cannot be read.
    """
    if prefill is None or decode is None:
        raise BadRequest("a pair needs both --prefill FILE and --decode FILE")
    before = None if router is None else opened(router)
    return PairedRecording(opened(prefill), opened(decode), before)
