"""`sgviz diff A B`: two runs of the same workload compared, request by request. Imports: recording, viz."""

from __future__ import annotations

from collections.abc import Sequence

from sgviz.cli.recorded import add_run, opened, parser


def main(argv: Sequence[str]) -> int:
    made = parser(
        "diff", "Compare two recordings of the same workload: first different decision, who got slower, why."
    )
    add_run(made, "a", "a recording (.sgv)")
    add_run(made, "b", "another one")
    made.add_argument("--most", type=int, default=10, metavar="N", help="requests to list (default: 10)")
    made.add_argument("--figure", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
    args = made.parse_args(argv)
    found = opened(args.a).diff(opened(args.b))
    print(found.text(max(0, args.most)))
    if args.figure:
        from sgviz.viz.diff_figure import diff_figure
        from sgviz.viz.save import save_figure

        print(save_figure(diff_figure(found), args.figure))
    return 0
