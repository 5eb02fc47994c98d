"""`sgviz report RUN`: one self-contained HTML file about a run, or about a pair of servers. Imports: recording, viz."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sgviz.cli.recorded import add_pair, check_target, opened, opened_pair, parser
from sgviz.errors import BadRequest, SgvizError


def main(argv: Sequence[str]) -> int:
    made = parser(
        "report", "Write one HTML file about a recording, or about both of a pair; it needs no network."
    )
    made.add_argument("run", metavar="RUN", nargs="?", help="a recording (.sgv)")
    add_pair(made)
    made.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to (default: beside the recording, .html; of a pair, the decode side's)",
    )
    args = made.parse_args(argv)
    if args.prefill or args.decode or args.router:
        return _of_pair(args)
    if args.run is None:
        made.error("give a recording (.sgv), or both of a pair by --prefill and --decode")
    from sgviz.viz.report import report_html

    target = _target(args, args.run)
    rec = opened(args.run)
    _write(target, report_html(rec, title=Path(args.run).name))
    print(rec.cost_words)
    return 0


def _of_pair(args: argparse.Namespace) -> int:
    if args.run is not None:
        raise BadRequest(
            f"a pair is named by --prefill and --decode, and {args.run!r} is one recording too many"
        )
    pair = opened_pair(args.prefill, args.decode, args.router)
    target = _target(args, args.decode, args.prefill, args.router)
    from sgviz.viz.pair_report import pair_report_html

    _write(target, pair_report_html(pair, title=f"{Path(args.prefill).name} and {Path(args.decode).name}"))
    print(pair.clock.words)
    return 0


def _target(args: argparse.Namespace, run: str, *others: str | None) -> Path:
    """Where the page goes. Raises BadRequest if that would overwrite a recording that is read."""
    target = Path(args.output) if args.output else Path(run).with_suffix(".html")
    for each in (run, *others):
        if each is not None:
            check_target(each, str(target))
    return target


def _write(target: Path, page: str) -> None:
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SgvizError(f"cannot write the report {str(target)!r}: {error}") from error
    print(target)
