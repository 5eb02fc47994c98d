"""`sgviz export RUN --to FORMAT`: a recording in the form another tool opens. Imports: recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgviz.cli.recorded import add_run, check_target, opened, parser
from sgviz.recording.export import FORMATS

ENDINGS = {"perfetto": ".pftrace", "otel": ".otlp.jsonl", "parquet": "-parquet", "csv": "-csv"}


def main(argv: Sequence[str]) -> int:
    lines = "; ".join(f"{name}: {what}" for name, (_, what) in FORMATS.items())
    made = parser("export", f"Write a recording for other tools. {lines}.")
    add_run(made)
    made.add_argument("--to", required=True, choices=list(FORMATS), help="the format")
    made.add_argument(
        "-o", "--output", metavar="PATH", help="file, folder or address (default: beside the recording)"
    )
    args = made.parse_args(argv)
    target = args.output or str(Path(args.run).with_suffix("")) + ENDINGS[args.to]
    check_target(args.run, target)
    for written in opened(args.run).export(args.to, target):
        print(written)
    return 0
