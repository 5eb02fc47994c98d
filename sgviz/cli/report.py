"""`sgviz report RUN`: one self-contained HTML file about a run. Imports: recording, viz."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgviz.cli.recorded import add_run, check_target, opened, parser
from sgviz.errors import SgvizError


def main(argv: Sequence[str]) -> int:
    made = parser("report", "Write one HTML file about a recording; it needs no network.")
    add_run(made)
    made.add_argument(
        "-o", "--output", metavar="FILE", help="where to (default: beside the recording, .html)"
    )
    args = made.parse_args(argv)
    from sgviz.viz.report import report_html

    target = Path(args.output) if args.output else Path(args.run).with_suffix(".html")
    check_target(args.run, str(target))
    rec = opened(args.run)
    page = report_html(rec, title=Path(args.run).name)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SgvizError(f"cannot write the report {str(target)!r}: {error}") from error
    print(target)
    print(rec.cost_words)
    return 0
