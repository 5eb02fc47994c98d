"""What the commands that read a recording share. Imports: recording, errors."""

from __future__ import annotations

import argparse
import sys

from sgviz.cli.options import Parser
from sgviz.recording import Recording, load


def parser(name: str, description: str) -> Parser:
    return Parser(prog=f"sgviz {name}", description=description)


def add_run(made: argparse.ArgumentParser, name: str = "run", what: str = "a recording (.sgv)") -> None:
    made.add_argument(name, metavar=name.upper(), help=what)


def opened(path: str) -> Recording:
    """The recording; SgvizError with one sentence if it cannot be read. A cut tail is told on the way."""
    rec = load(path)
    if rec.truncated:
        print(
            f"{path}: the last {rec.truncated:,} bytes are no whole event and are left out", file=sys.stderr
        )
    return rec
