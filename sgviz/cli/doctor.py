"""`sgviz doctor`: what this machine has, and what to do about what it lacks. Imports: doctor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sgviz.cli.options import port_number
from sgviz.doctor import render, report, to_json


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="sgviz doctor", description="Say what this machine has.")
    parser.add_argument("--port", type=port_number, default=30000, help="port to look at (default: 30000)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)
    found = report(args.port)
    if args.json:
        print(to_json(found))
    else:
        render(found)
    return found.exit_code
