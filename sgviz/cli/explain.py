"""`sgviz explain RUN RID`: where one request's time went, in words or as a picture. Imports: recording, viz."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from sgviz.cli.recorded import add_run, opened, parser
from sgviz.recording import Recording

MOST = 20


def main(argv: Sequence[str]) -> int:
    made = parser("explain", "Say where the time of a request went, and what it waited for.")
    add_run(made)
    made.add_argument("rid", metavar="RID", nargs="?", help="the request; without it, the slowest are listed")
    made.add_argument("--figure", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
    made.add_argument(
        "--at", type=float, metavar="MS", help="instead: why each waiting request did not run then"
    )
    args = made.parse_args(argv)
    rec = opened(args.run)
    if args.at is not None:
        table = rec.why_not_running(args.at)
        print("nobody waited then" if table.empty else table.to_string(index=False))
        return 0
    if args.rid is None:
        _list(rec)
        print(rec.cost_words)
        return 0
    print(rec.explain(args.rid).text(shutil.get_terminal_size((110, 24)).columns))
    print(f"\n{rec.cost_words}")
    if args.figure:
        from sgviz.viz.explain_figure import explain_figure
        from sgviz.viz.save import save_figure

        print(save_figure(explain_figure(rec, args.rid), args.figure))
    return 0


def _list(rec: Recording) -> None:
    """The slowest requests with what most of their time went into."""
    slowest = rec.waits.sort_values("total_ms", ascending=False).rid.head(MOST)
    for rid in slowest:
        explanation = rec.explain(rid)
        causes = list(explanation.by_cause().items())[:3]
        words = ", ".join(f"{cause} {ns / 1e6:,.1f}" for cause, ns in causes)
        print(f"{rid}  {explanation.total_ns / 1e6:,.3f} ms: {words}")
